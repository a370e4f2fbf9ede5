"""Matrices kept in the layout that oneDNN computes with, for decoding in float32 on a CPU.

`nn.Linear` takes about twice as long for two to thirty tokens as for one; scoring a draft then costs what it
should save. In oneDNN's own layout eight tokens cost little more than one. Results differ from nn.Linear's by
float32 rounding. Shapes: O outputs, I inputs.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from mtp.errors import UserError
from mtp.large_pages import large_pages

FEW_ROWS = 8  # a hint for oneDNN: how many tokens a product mostly has


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights cannot be packed here, or None where they can."""
    if device.type != "cpu":
        return f"weights are packed on a CPU only, and these are on {device.type}"
    if dtype != torch.float32:
        return f"weights are packed in float32 only, and these are {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN to pack weights for"
    return None


@functools.cache
def mkl_is_fast() -> bool:
    """Whether single tokens are better left to torch's own product: on Intel's processors, to MKL's."""
    cpu = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpu.is_file() and "GenuineIntel" in cpu.read_text()


class RMSNorm:
    """A norm of the trunk's kind: weight * x / sqrt(mean(x^2) + epsilon)."""

    def __init__(self, norm: Any):
        self.weight, self.epsilon = norm.weight.detach(), norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.epsilon)

    def scale(self, x: Tensor) -> float:
        """1 / sqrt(mean(x^2) + epsilon) of a single token: one call, where a norm is eight."""
        token = x.view(-1)
        return (torch.dot(token, token).item() / len(self.weight) + self.epsilon) ** -0.5


class Product:
    """x -> W x + b for the linears given, their outputs side by side, the weight in oneDNN's layout; of
    norm(x) where there is one.

    The linears lose their own weights until `restore`, but for those of `shared` (ids of parameters), which
    somebody else reads: a tied embedding keeps its rows. Where MKL is fast the weights that are released are
    kept column by column as well, for single tokens, and take their memory twice; the norm's weight is
    multiplied into these. There are no gradients.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], shared: Collection[int] = (), norm: RMSNorm | None = None
    ):
        self.linears, self.norm = linears, norm
        weights = [linear.weight.detach() for linear in linears]
        weight = weights[0] if len(linears) == 1 else torch.cat(weights)  # [O, I]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS)
        self.bias = joined_bias(linears)
        self.released = [linear for linear in linears if id(linear.weight) not in shared]
        self.columns = None
        if self.released and mkl_is_fast():
            self.columns = columns(weight if norm is None else weight * norm.weight)  # [I, O]
            self.shift = weight.new_zeros(len(weight)) if self.bias is None else self.bias
        for linear in self.released:
            linear.weight.data = linear.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self.columns is not None and x.numel() == x.shape[-1]:
            scale = 1.0 if self.norm is None else self.norm.scale(x)
            y = torch.addmm(self.shift, x.view(1, -1), self.columns, alpha=scale)
            return y.view(*x.shape[:-1], -1)
        normed = x if self.norm is None else self.norm(x)
        return torch.ops.mkldnn._linear_pointwise(normed, self.weight, self.bias, "none", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """W x + b + other in one pass, without a norm."""
        if self.columns is not None and x.numel() == x.shape[-1]:
            y = torch.addmm(other.view(1, -1), x.view(1, -1), self.columns)
            return (y if self.bias is None else y + self.bias).view(other.shape)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")

    def dense(self) -> Tensor:
        """The weight [O, I] as it was, bit for bit; a copy."""
        return self.weight.to_dense()

    def restore(self) -> None:
        """Give the linears their weights back."""
        parts = self.dense().split([linear.out_features for linear in self.linears])
        for linear, part in zip(self.linears, parts, strict=True):
            if linear in self.released:
                linear.weight.data = part.clone()


def columns(weight: Tensor) -> Tensor:
    """The matrix [O, I] as [I, O] in memory: a single token's product reads it faster than row by row."""
    copy = large_pages(weight.numel(), weight.dtype).view(weight.shape[1], weight.shape[0])
    return copy.copy_(weight.T)


def joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    some = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return torch.cat(some)


class PackedLinear(nn.Module):
    """Stands where an nn.Linear stood."""

    def __init__(self, linear: nn.Linear, shared: Collection[int] = ()):
        super().__init__()
        self.product = Product([linear], shared)
        self.reduced: dict[int, tuple[Tensor, Product]] = {}  # by the identity of the ids
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def some(self, x: Tensor, ids: Tensor) -> Tensor:
        """The outputs ids [R] only: [..., I] -> [..., R]. Their rows are packed once and kept."""
        if id(ids) not in self.reduced:
            bias = self.product.bias
            part = nn.Linear(self.product.linears[0].in_features, len(ids), bias=bias is not None)
            part.weight.data = self.product.dense()[ids]
            if bias is not None:
                part.bias.data = bias[ids]
            self.reduced[id(ids)] = (ids, Product([part]))
        return self.reduced[id(ids)][1](x)

    def restore(self) -> nn.Module:
        self.product.restore()
        return self.product.linears[0]


def refuse(*_: Any) -> None:
    raise UserError("this network is packed for decoding; call unpack() before it is saved, moved or cast")


def replace_modules(module: nn.Module, swap: Callable[[nn.Module], nn.Module]) -> None:
    """Put swap(child) in the place of every module below this one; what stays is entered."""
    for name, child in list(module.named_children()):
        new = swap(child)
        if new is child:
            replace_modules(child, swap)
        else:
            setattr(module, name, new)
