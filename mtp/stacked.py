"""Matrices as the C++ kernels read them: in the fewest bytes that lose nothing, and quantized where they only
draft.

Most checkpoints are stored in bfloat16. Decoded in float32, every one of their weights has sixteen zero bits,
which are not kept: half as much is to be read. Shapes: O outputs, I inputs.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtp.kernel import BFLOATS, BYTE_TILES, BYTES, FLOAT_TILES, FLOATS, TILES, Matrix, matrix_unit
from mtp.large_pages import large_pages
from mtp.packed import joined_bias

TILE_OUTPUTS, TILE_LINE = 16, 64  # outputs of what the processor's matrix unit reads at once; bytes of each
TILED = (TILES, FLOAT_TILES)  # kinds that take any number of tokens


class Stacked:
    """The weights of some linears as one matrix, outputs one after the other.

    Where they are bfloat16 numbers they are kept as such, and otherwise as tiles if they fit. The linears
    lose theirs until `restore`, but for those of `shared` (ids of parameters), which somebody else reads: a
    tied embedding keeps its rows. Floats that are shared or do not fit stay rows, of which the linears'
    weights become views.
    """

    def __init__(self, linears: Sequence[nn.Linear], shared: Collection[int] = ()):
        self.linears, self.bias = linears, joined_bias(linears)
        self.sizes, self.inputs = [one.out_features for one in linears], linears[0].in_features
        self.outputs = sum(self.sizes)
        weights = [linear.weight.data for linear in linears]
        released = [linear for linear in linears if id(linear.weight) not in shared]
        self.kind, self.released = kind_of(weights, len(released) < len(linears)), list[nn.Linear]()
        if self.kind == FLOATS:
            self.weight = in_large_pages(weights, torch.float32)
            self._give(linears, self.weight)
            return
        dtype = torch.float32 if self.kind == FLOAT_TILES else torch.bfloat16
        rows = torch.cat([weight.to(dtype) for weight in weights])
        self.weight = in_large_pages([tiles(rows) if self.kind in TILED else rows], dtype)
        self.released = released
        self._take()

    def _give(self, linears: Sequence[nn.Linear], rows: Tensor) -> None:
        """Their parts of rows [O, I] to some of the linears."""
        for one, part in zip(self.linears, rows.split(self.sizes), strict=True):
            if one in linears:
                one.weight.data = part

    def _take(self) -> None:
        for one in self.released:
            one.weight.data = one.weight.data.new_empty(0)

    def matrix(self) -> Matrix:
        return Matrix(self.weight.data_ptr(), None, address(self.bias), self.outputs, self.inputs, self.kind)

    def rows(self) -> Tensor:
        """The weights [O, I] in float32, bit for bit; a copy where they are kept otherwise."""
        if self.kind == FLOATS:
            return self.weight
        return (untiled(self.weight) if self.kind in TILED else self.weight).float()

    def quantized(self) -> "Quantized":
        return Quantized(self.rows().split(self.sizes), self.bias)

    def lend(self) -> None:
        """Give the linears their weights for a while."""
        if self.released:
            self._give(self.released, self.rows())

    def restore(self) -> None:
        """Give the linears weights of their own."""
        self.lend()
        for one in self.linears:
            one.weight.data = one.weight.data.clone()


@contextmanager
def lent(matrices: Sequence[Stacked]) -> Iterator[None]:
    """Linears with all their weights, for what is computed without a kernel."""
    for one in matrices:
        one.lend()
    try:
        yield
    finally:
        for one in matrices:
            one._take()


def kind_of(weights: Sequence[Tensor], shared: bool) -> int:
    """How the kernels read these weights [O, I] of one matrix fastest; where they are shared, floats stay
    rows, so that they are held once."""
    if not all(torch.equal(weight.bfloat16().float(), weight) for weight in weights):
        return FLOAT_TILES if fits_tiles(weights, 4) and not shared else FLOATS
    return TILES if fits_tiles(weights, 2) and matrix_unit() else BFLOATS


def fits_tiles(weights: Sequence[Tensor], size: int) -> bool:
    """Whether each of these [O, I] can be cut into tiles of numbers of `size` bytes."""
    return all(
        outputs % TILE_OUTPUTS == 0 and inputs % (TILE_LINE // size) == 0
        for outputs, inputs in (weight.shape for weight in weights)
    )


def tiles(rows: Tensor) -> Tensor:
    """Rows [O, I] as tiles of 16 outputs, in them four bytes of inputs, output by output; the shape says
    nothing any more. With numbers of two bytes, output 1 with inputs 0 and 1 stands behind output 0 with
    these:

    >>> tiles(torch.arange(512, dtype=torch.int16).view(16, 32)).flatten()[:6].tolist()
    [0, 1, 32, 33, 64, 65]
    """
    outputs, inputs = rows.shape
    size = rows.element_size()
    blocks = rows.view(
        outputs // TILE_OUTPUTS, TILE_OUTPUTS, inputs * size // TILE_LINE, TILE_LINE // 4, 4 // size
    )
    return blocks.permute(0, 2, 3, 1, 4).reshape(outputs, inputs)


def untiled(weight: Tensor) -> Tensor:
    """
    >>> rows = torch.arange(2048, dtype=torch.int16).view(32, 64)
    >>> torch.equal(untiled(tiles(rows)), rows)
    True
    """
    outputs, inputs = weight.shape
    size = weight.element_size()
    blocks = weight.view(
        outputs // TILE_OUTPUTS, inputs * size // TILE_LINE, TILE_LINE // 4, TILE_OUTPUTS, 4 // size
    )
    return blocks.permute(0, 3, 1, 2, 4).reshape(outputs, inputs)


class Quantized:
    """A matrix [O, I] as whole numbers of eight bits, by which each row's scale [O] is to be multiplied.

    The largest number of a row is 127, so that a weight is off by at most a 254th of its row's largest.
    """

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None):
        weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        self.scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.kind = BYTE_TILES if fits_tiles(parts, 1) and matrix_unit() else BYTES
        numbers = (weight / self.scale[:, None]).round().to(torch.int8)
        rows = tiles(numbers) if self.kind == BYTE_TILES else numbers
        self.weight, self.bias = in_large_pages([rows], torch.int8), bias

    def matrix(self) -> Matrix:
        return Matrix(
            self.weight.data_ptr(), address(self.scale), address(self.bias), *self.weight.shape, self.kind
        )


def in_large_pages(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrices [O, I] one under the other."""
    inputs, outputs = parts[0].shape[1], sum(len(part) for part in parts)
    weight = large_pages(outputs * inputs, dtype).view(outputs, inputs)
    return torch.cat(parts, out=weight) if dtype == parts[0].dtype else weight.copy_(torch.cat(parts))


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
