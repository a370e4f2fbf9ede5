"""A trunk's layers as one small C++ kernel, built for this machine: for decoding in float32 on a CPU.

Packed products still pay for Python and for oneDNN's calls. The kernel (kernel.cpp) reads every weight once,
in two bytes where these say it all, and with no second copy of any but of a tied embedding. It sums every
token's numbers in the same order however many are scored together, so that scoring a draft gives the very
bits that plain decoding gives.

Shapes: B rows, W tokens, S slots, K key heads of size D, H hidden size.
"""

import ctypes
import functools
from collections.abc import Collection, Iterator, Sequence
from ctypes import c_int64
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mtp.compiled_linear import MOST_TOKENS, CompiledLinear, CompiledNorm
from mtp.fast_layer import shared_weights, swap
from mtp.kernel import Layer, Run, library
from mtp.packed import refuse
from mtp.stacked import TILED, Quantized, Stacked, address, lent
from mtp.storage import Own, Storage


class CompiledLayer(nn.Module):
    """Stands where a decoder layer stood and is called as it was; `restore` gives that layer back.

    Long texts, such as prompts, still go through that layer, unless all of its weights lie in tiles.
    """

    def __init__(self, layer: Any, shared: Collection[int] = ()):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = [layer]
        self.index = attention.layer_idx
        self.stacked = [
            Stacked(linears, shared)
            for linears in (
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [attention.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            )
        ]
        self.unbounded = all(one.kind in TILED for one in self.stacked)
        self.size = attention.head_dim
        self.queries = attention.q_proj.out_features // self.size
        self.keys = attention.k_proj.out_features // self.size
        self.inner = mlp.down_proj.in_features
        heads = 2 * (self.queries + self.keys) * self.size
        self.scratch = 2 * attention.q_proj.in_features + heads + 3 * self.inner  # numbers that a token needs
        self.run_layers, self.struct = library().run_layers, self._struct(layer, self.stacked)
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    def _struct(self, layer: Any, matrices: Sequence[Stacked | Quantized]) -> Layer:
        attention, first, second = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        weight = lambda name: norm.weight.data_ptr() if (norm := getattr(attention, name, None)) else None  # noqa: E731
        return Layer(
            *(one.matrix() for one in matrices),
            first.weight.data_ptr(), second.weight.data_ptr(), weight("q_norm"), weight("k_norm"),
            first.weight.numel(), self.inner, self.queries, self.keys, self.size,
            first.variance_epsilon, attention.scaling,
        )  # fmt: skip

    def quantized(self) -> tuple[Layer, list[Quantized]]:
        """The same layer on quantized weights, which are to be kept as long as it."""
        matrices = [stacked.quantized() for stacked in self.stacked]
        return self._struct(self.layer[0], matrices), matrices

    def restore(self) -> nn.Module:
        for stacked in self.stacked:
            stacked.restore()
        return self.layer[0]

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        cache: Any = None,
        **_: Any,
    ) -> Tensor:
        """hidden [B, W, H] -> [B, W, H]; the other arguments as in Trunk.run."""
        if self.takes(hidden, attention_mask, cache):
            return self.run(hidden, (1,), attention_mask, position_embeddings, cache)[0]
        rotary = unsigned(*position_embeddings)
        with lent(self.stacked):
            return self.layer[0](
                hidden, attention_mask=attention_mask, position_embeddings=rotary, cache=cache
            )

    def takes(self, hidden: Tensor, mask: Tensor | None, cache: Any) -> bool:
        """Whether the kernel can run this: few tokens if need be, a boolean mask, a cache to write to."""
        few = self.unbounded or hidden.shape[0] * hidden.shape[1] <= MOST_TOKENS
        known = cache is None or hasattr(cache, "storage")
        return few and known and (mask is None or mask.dtype == torch.bool)

    def run(
        self, hidden: Tensor, ends: tuple[int, ...], mask: Tensor | None, rotary: Any, cache: Any
    ) -> Tensor:
        """Run ends[-1] layers of the trunk from this one on, all in one call; the states [len(ends), B, W, H]
        after so many of them.

        With ends (1, 3) three layers run, and the states are those after the first and the third.
        """
        count, hidden, rotary = ends[-1], hidden.contiguous(), tuple(map(Tensor.contiguous, rotary))
        indices = range(self.index, self.index + count)
        storage = (cache or Own()).storage(indices, hidden, self.keys, self.size)
        mask = None if mask is None else mask.contiguous()
        scratch = hidden.new_empty(hidden.shape[0] * hidden.shape[1] * self.scratch)
        states = hidden.new_empty(len(ends), *hidden.shape)
        given = {"mask": mask, "rotary": rotary, "storage": storage}
        what = self.what(hidden, ends, **given, scratch=scratch.data_ptr(), states=states.data_ptr())
        self.run_layers(self.struct, what)
        return states

    def what(
        self,
        hidden: Tensor,
        ends: tuple[int, ...],
        *,
        mask: Tensor | None,
        rotary: Sequence[Tensor],
        storage: Storage,
        scratch: int,
        states: int,
    ) -> Run:
        """A run as the kernel knows it, with addresses of what it works in and where states go. The tensors
        have no gaps and must be kept until it is over."""
        batch, width, _ = hidden.shape
        cosines, sines = rotary
        stored = storage.stored
        mask_step = 0 if mask is None or len(mask) == 1 else mask.stride(0)
        return Run(
            ends[-1], batch, width, storage.size,
            hidden.data_ptr(), cosines.data_ptr(), sines.data_ptr(), cosines.numel() // self.size,
            stored.pointers, stored.text_step, stored.head_step,
            address(storage.slots), storage.first, address(mask), mask_step,
            places(ends), scratch, states,
        )  # fmt: skip


@functools.lru_cache
def places(ends: tuple[int, ...]) -> Any:
    """Where each layer's output goes: a state that is asked for is written until it is whole.

    >>> list(places((1, 3)))
    [0, 1, 1]
    """
    found = [place for place, end in enumerate(ends) for _ in range(end - (ends[place - 1] if place else 0))]
    return (c_int64 * len(found))(*found)


def unsigned(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """What FastRotary made, as the architecture's own layer reads it."""
    low, high = sines.chunk(2, dim=-1)
    return cosines, torch.cat([-low, high], dim=-1)


def compile_modules(module: nn.Module, trunk: Any) -> None:
    """Put compiled modules in the place of all layers of the trunk's kind and all linears below `module`."""
    shared = shared_weights(module)
    swap(
        module,
        trunk,
        lambda layer: CompiledLayer(layer, shared),
        lambda linear: CompiledLinear(linear, shared),
        CompiledNorm,
    )
    for layer, following in pairwise(trunk.layers):
        layer.struct.next = ctypes.addressof(following.struct)


def stacks(module: nn.Module) -> Iterator[Stacked]:
    """All matrices of the compiled modules below this one."""
    for part in module.modules():
        if isinstance(part, CompiledLayer):
            yield from part.stacked
        elif isinstance(part, CompiledLinear):
            yield part.stacked
