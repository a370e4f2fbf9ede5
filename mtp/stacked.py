"""Matrices as the C++ kernels read them, row by row: in float32, and quantized where they only draft.

Shapes: O outputs, I inputs.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_size_t, c_void_p

import torch
from torch import Tensor, nn

from mtp.kernel import Matrix
from mtp.packed import joined_bias

LARGE_PAGE, MADV_HUGEPAGE = 2**21, 14  # bytes; Linux's advice, which it may well not take


class Stacked:
    """The weights of some linears as one matrix, outputs one after the other; theirs become views of it."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears
        self.weight = in_large_pages([linear.weight.data for linear in linears], torch.float32)
        parts = self.weight.split([linear.out_features for linear in linears])
        for one, part in zip(linears, parts, strict=True):
            one.weight.data = part
        self.bias = joined_bias(linears)

    def matrix(self) -> Matrix:
        return Matrix(self.weight.data_ptr(), None, address(self.bias), *self.weight.shape)

    def quantized(self) -> "Quantized":
        return Quantized(self.weight, self.bias)

    def restore(self) -> None:
        for one in self.linears:
            one.weight.data = one.weight.data.clone()


class Quantized:
    """A matrix [O, I] as whole numbers of eight bits, by which each row's scale [O] is to be multiplied.

    The largest number of a row is 127, so that a weight is off by at most a 254th of its row's largest.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.weight, self.bias = in_large_pages([(weight / self.scale[:, None]).round()], torch.int8), bias

    def matrix(self) -> Matrix:
        return Matrix(self.weight.data_ptr(), address(self.scale), address(self.bias), *self.weight.shape)


def in_large_pages(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrices [O, I] one under the other."""
    inputs, outputs = parts[0].shape[1], sum(len(part) for part in parts)
    weight = large_pages(outputs * inputs, dtype).view(outputs, inputs)
    return torch.cat(parts, out=weight) if dtype == parts[0].dtype else weight.copy_(torch.cat(parts))


def large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers, of any value, in memory that may lie in large pages.

    What the processor fetches ahead ends with a page: in pages of 4 KB reading weights takes a tenth longer.
    """
    size = dtype.itemsize
    buffer = torch.empty(count + 2 * LARGE_PAGE // size, dtype=dtype)
    start = -buffer.data_ptr() % LARGE_PAGE // size
    numbers = buffer[start : start + count]
    ctypes.CDLL(None).madvise(c_void_p(numbers.data_ptr()), c_size_t(size * count), MADV_HUGEPAGE)
    return numbers


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
