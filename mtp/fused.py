"""A layer but for its attention, as functions of its weights that torch.compile fuses to a few kernels.

Being functions, they are compiled once a width for all layers of a network. Shapes: W nodes, N nodes in all
rows, H hidden size, Q query heads, K key heads, D head dimension.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

WIDTHS = (1, 2, 4, 8, 16)  # of what is captured; longer runs, such as prompts, go through the layers
Tell = Callable[[str], None]


class Attention(NamedTuple):
    """Weights before attention: a norm, queries, keys and values as one matrix, the norms of heads."""

    norm: Tensor
    weight: Tensor  # [(Q + 2K) D, H]
    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None


class Rest(NamedTuple):
    """Weights after attention."""

    out: Tensor
    out_bias: Tensor | None
    norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def fusing() -> bool:
    """Whether torch.compile can make kernels for a GPU here: it needs Triton, which not every build has."""
    from torch.utils._triton import has_triton

    return has_triton()


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, rounded as transformers rounds it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of heads [N, heads, D]."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cosines[:, None] + torch.cat([-high, low], dim=-1) * sines[:, None]


def asked(
    hidden: Tensor, rotary: tuple[Tensor, Tensor], part: Attention, epsilon: float, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, H], rotary two of [N, D], heads (Q, K) -> queries [N, Q, D], keys and values [N, K, D]."""
    count, (queries, keys) = hidden.shape[0], heads
    joined = linear(normed(hidden, part.norm, epsilon), part.weight, part.bias)
    query, key, value = joined.view(count, queries + 2 * keys, -1).split([queries, keys, keys], dim=1)
    if part.query_norm is not None and part.key_norm is not None:
        query, key = normed(query, part.query_norm, epsilon), normed(key, part.key_norm, epsilon)
    return turned(query, *rotary), turned(key, *rotary), value


def answered(seen: Tensor, hidden: Tensor, rest: Rest, epsilon: float) -> Tensor:
    """What attention saw [N, Q D] and the layer's input [N, H] -> the layer's output [N, H]."""
    hidden = hidden + linear(seen, rest.out, rest.out_bias)
    both = linear(normed(hidden, rest.norm, epsilon), rest.gate_up, rest.gate_up_bias)
    gate, up = both.chunk(2, dim=-1)
    return hidden + linear(silu(gate) * up, rest.down, rest.down_bias)


class Shared:
    """What all captured layers of a network have in common: compiled functions and the graphs' memory."""

    def __init__(self) -> None:
        self.pool: Any = None  # of the first graph; later ones reuse what it needs only while it runs
        self.fused: set[int] = set()  # node counts N for which the compiled functions are ready
        self.compiled = (torch.compile(asked, dynamic=False), torch.compile(answered, dynamic=False))

    def functions(self, count: int) -> tuple[Any, Any]:
        return self.compiled if count in self.fused else (asked, answered)

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self, layer: Any, tell: Tell) -> None:
        """Compile for every width of one text; with inductor's cache on disk that is quick again.

        Where compiling fails, for want of a C compiler say, that is told, and the functions run as they are.
        """
        for width in WIDTHS:
            began = time.perf_counter()
            try:
                self._compile(layer, width)
            except Exception as error:  # of many kinds: what lies below torch.compile may raise anything
                tell(f"not compiled, only captured ({' '.join(str(error).split())[:160]})")
                return
            self.fused.add(width)
            seconds = time.perf_counter() - began
            tell(f"compiled the step for {width} token{'s' * (width > 1)} ({seconds:.1f} s)")

    def _compile(self, layer: Any, width: int) -> None:
        hidden = layer.attention.norm.new_zeros(width, len(layer.attention.norm))
        rotary = (hidden.new_zeros(width, layer.size), hidden.new_zeros(width, layer.size))
        with torch._dynamo.config.patch(recompile_limit=64):  # of all networks together
            query, _, _ = self.compiled[0](hidden, rotary, layer.attention, layer.epsilon, layer.heads)
            self.compiled[1](query.flatten(1), hidden, layer.rest, layer.epsilon)
