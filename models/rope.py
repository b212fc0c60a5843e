"""Rotary positions: which angle each dimension turns by at each position, and the turning itself."""

import math

import torch
from torch import Tensor, nn

from models.config import Config, RopeScaling


def inverse_frequencies(config: Config) -> Tensor:
    """Radians per position for each rotating pair, float32 `[rotary_dim / 2]`, on the CPU. arXiv:2104.09864."""
    exponent = torch.arange(0, config.rotary_dim, 2, device="cpu").float() / config.rotary_dim
    plain = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":  # dynamic depends on the length: see Rope.forward
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return llama3(plain, scaling)
    return yarn(plain, scaling, config)


def llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended (Llama 3.1's own rule)."""
    turns = scaling.original_max_position * plain / (2 * math.pi)  # full turns within the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def yarn(plain: Tensor, scaling: RopeScaling, config: Config) -> Tensor:
    """NTK-by-parts: dimensions with many turns keep their frequency, the rest is stretched. arXiv:2309.00071, 3.2."""

    def dimension(turns: float) -> float:
        wave = scaling.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wave) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    pairs = torch.arange(len(plain), device="cpu").float()
    stretch = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * plain / scaling.factor + (1 - stretch) * plain


class Rope(nn.Module):
    """Positions `[B, T]` to cos and sin `[B, 1, T, rotary_dim / 2]`, float32.

    Angles are computed from the positions on the fly, so there is no table to outgrow.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def _apply(self, fn, recurse=True):
        # model.to(bfloat16) may move the frequencies but must not round them: at position 2048 a bfloat16
        # frequency is off by more than a whole turn.
        super()._apply(fn, recurse)
        self.inv_freq = inverse_frequencies(self.config).to(self.inv_freq.device)
        return self

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        scaling = self.config.rope_scaling
        inv_freq = self.inv_freq
        if scaling is not None and scaling.kind == "dynamic":
            inv_freq = self.dynamic(pos, scaling)  # [B, 1, 1, rotary_dim / 2]
        angle = pos[:, None, :, None].float() * inv_freq  # [B, 1, T, rotary_dim / 2]
        gain = scaling.attention_factor if scaling is not None else 1.0
        return angle.cos() * gain, angle.sin() * gain

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate x `[B, heads, n, D]` on by `by [B, n]` positions, without the gain that yarn multiplies in.

        Turning a key by the difference of two positions moves it from one to the other.
        """
        angle = by[:, None, :, None].float() * self.inv_freq
        return rotate(x.float(), angle.cos(), angle.sin()).to(x.dtype)

    def dynamic(self, pos: Tensor, scaling: RopeScaling) -> Tensor:
        """NTK base that grows with the row's length so far. Keys cached earlier keep their older angle,
        as in transformers, so past the trained length cached decoding differs from one long forward."""
        d = self.config.rotary_dim
        length = (pos.amax(1) + 1).clamp(min=scaling.original_max_position).float()
        stretch = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
        exponent = torch.arange(0, d, 2, device=pos.device).float() / d
        base = self.config.rope_theta * stretch ** (d / (d - 2))  # [B]
        return base[:, None, None, None] ** -exponent


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the leading `2 * cos.shape[-1]` dimensions of x `[B, heads, T, D]`; pairs are (i, i + half)."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
