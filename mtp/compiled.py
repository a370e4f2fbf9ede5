"""A trunk's layers as one small C++ kernel, built for this machine: for decoding in float32 on a CPU.

Packed products still pay for Python and for oneDNN's calls. The kernel (kernel.cpp) reads every weight once
and in place, with no second copy of any. It sums every token's numbers in the same order however many are
scored together, so that scoring a draft gives the very bits that plain decoding gives.

Shapes: B rows, W tokens, S slots, K key heads of size D, H hidden size.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp.fast_layer import swap
from mtp.kernel import Layer, Matrix, library
from mtp.packed import joined_bias, refuse

LARGE_PAGE, MADV_HUGEPAGE = 2**21, 14  # bytes; Linux's advice, which it may well not take
MOST_TOKENS = 32  # beyond, torch's own products are the faster ones


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
        self.library, self.struct = library(), self._struct(layer)
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
        batch, width, size = hidden.shape
        tokens = batch * width
        if tokens > MOST_TOKENS or (attention_mask is not None and attention_mask.dtype != torch.bool):
            rotary = unsigned(*position_embeddings)
            return self.layer[0](
                hidden, attention_mask=attention_mask, position_embeddings=rotary, cache=cache
            )
        hidden, (cosines, sines) = hidden.contiguous(), (angle.contiguous() for angle in position_embeddings)
        scratch = hidden.new_empty(tokens * (3 * size + self.queries * self.size + 3 * self.inner))
        heads = hidden.new_empty(batch, width, self.queries + 2 * self.keys, self.size)
        self.library.project(
            self.struct, tokens, cosines.numel() // self.size,
            hidden.data_ptr(), cosines.data_ptr(), sines.data_ptr(), scratch.data_ptr(), heads.data_ptr(),
        )  # fmt: skip
        _, keys, values = heads.transpose(1, 2).split((self.queries, self.keys, self.keys), dim=1)
        keys, values = cache.update(keys, values, self.index) if cache else (keys, values)
        keys, values = rows_side_by_side(keys, values)
        mask = None if attention_mask is None else attention_mask.contiguous()
        output = torch.empty_like(hidden)
        self.library.finish(
            self.struct, batch, width, keys.shape[2], hidden.data_ptr(), heads.data_ptr(),
            keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1),
            *((None, 0) if mask is None else (mask.data_ptr(), mask.stride(0) if len(mask) > 1 else 0)),
            scratch.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        return output


def unsigned(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """What FastRotary made, as the architecture's own layer reads it."""
    low, high = sines.chunk(2, dim=-1)
    return cosines, torch.cat([-low, high], dim=-1)


def rows_side_by_side(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, S, D] as the kernel reads them: a head's slots in a row, both laid out alike."""
    if keys.stride()[2:] != (keys.shape[3], 1) or keys.stride() != values.stride():
        return keys.contiguous(), values.contiguous()
    return keys, values


def compile_modules(module: nn.Module, trunk: Any) -> None:
    """Put compiled modules in the place of all layers of the trunk's kind and all linears below `module`."""
    swap(module, trunk, CompiledLayer, CompiledLinear)
