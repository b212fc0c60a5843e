"""PyramidKV: attention narrows from layer to layer, so later layers need fewer tokens. arXiv:2406.02069, 4.2.

With N = budget - guarded, the tokens a layer is free to choose, shares fall along a line

    from 2N - N / beta in the first layer down to N / beta in the last

and each layer holds guarded + its share. The mean share is N: beta = 1 is a level line, a large beta almost
a triangle.

Deviations. The authors' code rounds the line's step down and starts at its top, so it keeps more than it
says (11 % more at a budget of 128 with 32 layers and a window of 32); here the sum is exact, and
`legacy_floor` is their arithmetic. It also flattens the line for prompts shorter than the first layer's
share; here layers are sized before any prompt is known. `guarded` is the paper's window of tokens that each
layer keeps anyway, with our sinks added: at least the policy's sinks + recent, or the last layer cannot hold
them.
"""

from dataclasses import dataclass

from minikv.axes import LayerSplit


@dataclass(frozen=True)
class PyramidKV(LayerSplit):
    """Linearly fewer tokens from the first layer to the last."""

    beta: float = 20
    guarded: int = 36
    legacy_floor: bool = False

    def __post_init__(self):
        if self.beta < 1:
            raise ValueError(f"pyramidkv needs beta of 1 or more, not {self.beta}")
        if self.guarded < 0:
            raise ValueError(f"pyramidkv needs guarded of 0 or more, not {self.guarded}")

    def split_layers(self, budget: int, n_layers: int) -> list[int]:
        """Sums to exactly `budget * n_layers`, or to more with `legacy_floor`; never rises with depth.

        A budget that does not exceed `guarded` is the same for all layers.
        """
        free = budget - self.guarded
        if free <= 0 or n_layers == 1:
            return [budget] * n_layers
        steps = n_layers - 1
        if self.legacy_floor:
            most = 2 * free - int(free // self.beta)
            step = 2 * (most - free) // steps
            return [self.guarded + most - layer * step for layer in range(n_layers)]
        # Layers equally far from the middle differ from the mean by the same, up and down, so that rounding
        # leaves the sum as it is.
        slope = (free - free / self.beta) / steps
        return [budget + round(slope * (steps - 2 * layer)) for layer in range(n_layers)]
