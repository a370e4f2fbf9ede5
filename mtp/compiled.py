"""A trunk's layers as one small C++ kernel, built for this machine: for decoding in float32 on a CPU.

Packed products still pay for Python and for oneDNN's calls. The kernel (kernel.cpp) reads every weight once
and in place, with no second copy of any. It sums every token's numbers in the same order however many are
scored together, so that scoring a draft gives the very bits that plain decoding gives.

Shapes: B rows, W tokens, S slots, K key heads of size D, H hidden size.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp.fast_layer import swap
from mtp.kernel import Layer, Matrix, Run, library
from mtp.packed import joined_bias, refuse

LARGE_PAGE, MADV_HUGEPAGE = 2**21, 14  # bytes; Linux's advice, which it may well not take
MOST_TOKENS = 32  # beyond, torch's own products are the faster ones


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a run of layers puts its keys and values, and how many slots there are to look at."""

    layers: list[tuple[Tensor, Tensor]]  # [B, K, S or more, D] each, all of one shape and without gaps
    size: int  # S
    first: int = 0  # the first token's slot
    slots: Tensor | None = None  # [B, W] every token's slot, where they do not follow each other


class Stacked:
    """The weights of some linears as one matrix, outputs one after the other; theirs become views of it."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears
        self.weight = in_large_pages([linear.weight.data for linear in linears])
        parts = self.weight.split([linear.out_features for linear in linears])
        for one, part in zip(linears, parts, strict=True):
            one.weight.data = part
        self.bias = joined_bias(linears)

    def matrix(self) -> Matrix:
        bias = None if self.bias is None else self.bias.data_ptr()
        return Matrix(self.weight.data_ptr(), bias, *self.weight.shape)

    def restore(self) -> None:
        for one in self.linears:
            one.weight.data = one.weight.data.clone()


def in_large_pages(parts: list[Tensor]) -> Tensor:
    """The matrices [O, I] one under the other, in memory that may lie in large pages.

    What the processor fetches ahead ends with a page: in pages of 4 KB reading weights takes a tenth longer.
    """
    inputs, outputs = parts[0].shape[1], sum(len(part) for part in parts)
    buffer = parts[0].new_empty(outputs * inputs + 2 * LARGE_PAGE // 4)
    start = -buffer.data_ptr() % LARGE_PAGE // 4
    weight = buffer[start : start + outputs * inputs].view(outputs, inputs)
    ctypes.CDLL(None).madvise(c_void_p(weight.data_ptr()), c_size_t(4 * weight.numel()), MADV_HUGEPAGE)
    return torch.cat(parts, out=weight)


class CompiledLinear(nn.Module):
    """Stands where an nn.Linear stood."""

    def __init__(self, original: nn.Linear):
        super().__init__()
        self.linear = [original]  # in a list: no submodule, as in CompiledLayer
        self.stacked = Stacked([original])
        self.matrix, self.product = self.stacked.matrix(), library().product
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    @property
    def weight(self) -> Tensor:
        return self.linear[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear[0].bias

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.numel() // x.shape[-1]
        if tokens > MOST_TOKENS:
            return linear(x, self.weight, self.bias)
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.matrix.outputs)
        self.product(self.matrix, tokens, x.data_ptr(), y.data_ptr())
        return y

    def restore(self) -> nn.Module:
        self.stacked.restore()
        return self.linear[0]


class CompiledNorm(nn.Module):
    """Stands where a norm of the trunk's kind stood."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm
        self.weight, self.epsilon, self.normalize = norm.weight, norm.variance_epsilon, library().normalize
        self.register_state_dict_pre_hook(refuse)

    def restore(self) -> nn.Module:
        return self.norm

    def forward(self, x: Tensor) -> Tensor:
        x, size = x.contiguous(), x.shape[-1]
        y = torch.empty_like(x)
        self.normalize(
            self.weight.data_ptr(), x.numel() // size, size, self.epsilon, x.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y


class CompiledLayer(nn.Module):
    """Stands where a decoder layer stood and is called as it was; `restore` gives that layer back.

    Long texts, such as prompts, still go through that layer.
    """

    def __init__(self, layer: Any):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = [layer]
        self.index = attention.layer_idx
        self.stacked = [
            Stacked(linears)
            for linears in (
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [attention.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            )
        ]
        self.size = attention.head_dim
        self.queries = attention.q_proj.out_features // self.size
        self.keys = attention.k_proj.out_features // self.size
        self.inner = mlp.down_proj.in_features
        self.run_layers, self.struct = library().run_layers, self._struct(layer)
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    def _struct(self, layer: Any) -> Layer:
        attention, first, second = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        weight = lambda name: norm.weight.data_ptr() if (norm := getattr(attention, name, None)) else None  # noqa: E731
        return Layer(
            *(stacked.matrix() for stacked in self.stacked),
            first.weight.data_ptr(), second.weight.data_ptr(), weight("q_norm"), weight("k_norm"),
            first.weight.numel(), self.inner, self.queries, self.keys, self.size,
            first.variance_epsilon, attention.scaling,
        )  # fmt: skip

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
        return self.layer[0](hidden, attention_mask=attention_mask, position_embeddings=rotary, cache=cache)

    def takes(self, hidden: Tensor, mask: Tensor | None, cache: Any) -> bool:
        """Whether the kernel can run this: few tokens, a boolean mask, and a cache that it can write to."""
        few = hidden.shape[0] * hidden.shape[1] <= MOST_TOKENS
        known = cache is None or hasattr(cache, "storage")
        return few and known and (mask is None or mask.dtype == torch.bool)

    def run(
        self, hidden: Tensor, ends: tuple[int, ...], mask: Tensor | None, rotary: Any, cache: Any
    ) -> Tensor:
        """Run ends[-1] layers of the trunk from this one on, all in one call; the states [len(ends), B, W, H]
        after so many of them.

        With ends (1, 3) three layers run, and the states are those after the first and the third.
        """
        batch, width, size = hidden.shape
        count, hidden, (cosines, sines) = ends[-1], hidden.contiguous(), map(Tensor.contiguous, rotary)
        indices = range(self.index, self.index + count)
        storage = (cache or Own()).storage(indices, hidden, self.keys, self.size)
        tensors = [tensor for pair in storage.layers for tensor in pair]
        mask = None if mask is None else mask.contiguous()
        mask_step = 0 if mask is None or len(mask) == 1 else mask.stride(0)
        numbers = 2 * size + 2 * (self.queries + self.keys) * self.size + 3 * self.inner
        scratch = hidden.new_empty(batch * width * numbers)
        states = hidden.new_empty(len(ends), batch, width, size)
        what = Run(
            count, batch, width, storage.size,
            hidden.data_ptr(), cosines.data_ptr(), sines.data_ptr(), cosines.numel() // self.size,
            addresses(tensors), tensors[0].stride(0), tensors[0].stride(1),
            None if storage.slots is None else storage.slots.data_ptr(), storage.first,
            None if mask is None else mask.data_ptr(), mask_step,
            places(ends), scratch.data_ptr(), states.data_ptr(),
        )  # fmt: skip
        self.run_layers(self.struct, what)
        return states


class Own:
    """Keys and values of texts that nothing goes before; every layer uses the same memory."""

    def storage(self, layers: Sequence[int], hidden: Tensor, heads: int, size: int) -> Storage:
        batch, width = hidden.shape[:2]
        keys, values = hidden.new_empty(2, batch, heads, width, size)
        return Storage([(keys, values)] * len(layers), width)


def addresses(tensors: Sequence[Tensor]) -> Any:
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


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
    swap(module, trunk, CompiledLayer, CompiledLinear, CompiledNorm)
    for layer, following in pairwise(trunk.layers):
        layer.struct.next = ctypes.addressof(following.struct)
