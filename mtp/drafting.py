"""Drafting with a compiled head: all its depths, or one where a law is needed of each, in one call.

The call is draft.cpp's. Weights of heads, and the output matrix where it drafts, are quantized to eight bits
here, a quarter of what there is to read: a draft may be a little off, as the trunk judges it with its own
weights.

Shapes: B rows, W columns, C columns read out, H hidden size, R rows of the output matrix, V vocabulary, D
depths.
"""

import functools
import math
from collections.abc import Callable
from ctypes import POINTER, pointer
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mtp import kernel
from mtp.compiled import CompiledLayer
from mtp.compiled_linear import MOST_TOKENS, CompiledLinear
from mtp.stacked import Quantized, address


@dataclass(frozen=True, slots=True)
class Parts:
    """The modules of one depth of a head, in whatever form."""

    layer: Any
    norm: Any  # before the output matrix
    join: tuple[Any, Any, Any] | None = None  # the norms of token and state, and the linear that joins them


@dataclass(frozen=True, slots=True)
class Columns:
    """What depths work on: W columns of every row, and where they lie."""

    states: Tensor  # [B, W, H] what the first depth reads
    line: Tensor  # [B, ...] tokens; depth d = 1, 2, ... of a call reads the token `offset` + d - 1 columns on
    offset: int
    read: Tensor  # [B, C] columns that are read out
    rotary: tuple[Tensor, Tensor]
    mask: Tensor | None  # as a KVCache's window has it, opened with `causal`
    cache: Any


def picked(states: Tensor, columns: Tensor) -> Tensor:
    """States [B, W, H] at columns [B, C] -> [B, C, H]."""
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[2]))


@functools.lru_cache(1024)
def columns_at(places: tuple[int, ...], device: torch.device) -> Tensor:
    """One column [B, 1] a row; to be read only."""
    return torch.tensor(places, device=device)[:, None]


class OutputRows:
    """The output matrix for drafting, whole or the rows of `ids` [R]."""

    def __init__(self, linear: CompiledLinear, ids: Tensor | None):
        rows, bias = linear.stacked.rows(), linear.bias
        self.ids, self.vocab_size = ids, len(rows)
        if ids is not None:
            rows, bias = rows[ids], None if bias is None else bias[ids]
        self.quantized = Quantized([rows], bias)
        self.size = len(self.quantized.weight)
        self.struct = kernel.Output(self.quantized.matrix(), address(ids))

    def full(self, logits: Tensor) -> Tensor:
        """Logits [..., R] -> [..., V], -inf where nothing may be drafted."""
        if self.ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return whole.index_copy_(-1, self.ids, logits)


class Stage:
    """One depth as the kernel knows it, and what its pointers point to."""

    def __init__(self, parts: Parts):
        self.parts, (block, self.kept) = parts, parts.layer.quantized()
        joined: list[Any] = [None, None, kernel.Matrix()]
        if parts.join is not None:
            token, state, linear = parts.join
            self.project: Quantized = linear.stacked.quantized()
            joined = [address(token.weight), address(state.weight), self.project.matrix()]
        self.struct = kernel.Stage(*joined, block, address(parts.norm.weight))

    @property
    def kinds(self) -> set[int]:
        return {matrix.kind for matrix in self.kept} | ({self.project.kind} if self.parts.join else set())


class Depths:
    """A head that is drafted with in one call."""

    def __init__(self, trunk: Any, parts: Callable[[int], Parts], ids: Tensor | None, chained: bool):
        self.parts, self.chained = parts, chained
        self.embedding = trunk.model.model.embed_tokens.weight
        self.output = output_rows(trunk, ids)
        self.stages: dict[int, Stage] = {}  # by the identity of the layer: deep depths share one
        self.pointers: dict[tuple[int, int], Any] = {}  # to some of them, by first depth and count
        self.layer = self.stage(1).parts.layer
        self.angles = Angles(trunk)
        rows = kernel.BYTES in self.stage(1).kinds  # not only tiles, so that every column costs
        self.most = MOST_TOKENS if rows else None
        self.run = kernel.library().draft_depths

    def greedy(self, columns: Columns, count: int) -> Tensor:
        """Depths 1 ... count, each fed the best token of the one before: [B, D]."""
        picks = columns.read.new_empty(count, len(columns.read))
        tokens = picks.T
        self._call(columns, 1, count, picks)
        return tokens

    def logits(self, columns: Columns, first: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Depths first ... first + count - 1: the last one's states [B, W, H], and logits [D, B, C, V]."""
        memory = self._call(columns, first, count)
        said = memory.view(1, count, *columns.read.shape, self.output.size)
        return memory.view(0, *columns.states.shape), self.output.full(said)

    def _call(self, columns: Columns, first: int, count: int, picks: Tensor | None = None) -> "Pieces":
        """States, logits, and what they were made in."""
        layer, hidden, read = self.layer, columns.states.contiguous(), columns.read.contiguous()
        storage = columns.cache.storage(range(first - 1, first - 1 + count), hidden, layer.keys, layer.size)
        rotary = tuple(map(Tensor.contiguous, columns.rotary))
        mask = None if columns.mask is None else columns.mask.contiguous()
        batch, width, size = hidden.shape
        tokens, rows = batch * width, count * read.numel()
        scratch = tokens * (layer.scratch + 3 * size)
        memory = Pieces(hidden, [tokens * size, rows * self.output.size, rows * size, scratch])
        given = {"mask": mask, "rotary": rotary, "storage": storage}
        what = layer.what(hidden, (1,), **given, scratch=memory.address(3), states=memory.address(0))
        line = columns.line.data_ptr() + columns.line.element_size() * (columns.offset - 1)
        self.run(kernel.Depths(
            count, self._pointers(first, count), what, self.chained, address(self.embedding),
            line, columns.line.stride(0), address(read), read.shape[1], self.output.struct,
            memory.address(2), memory.address(1), address(picks),
        ))  # fmt: skip
        return memory

    def _pointers(self, first: int, count: int) -> Any:
        if (first, count) not in self.pointers:
            structs = [pointer(self.stage(depth).struct) for depth in range(first, first + count)]
            self.pointers[first, count] = (POINTER(kernel.Stage) * count)(*structs)
        return self.pointers[first, count]

    def stage(self, depth: int) -> Stage:
        parts = self.parts(depth)
        if id(parts.layer) not in self.stages:
            self.stages[id(parts.layer)] = Stage(parts)
        return self.stages[id(parts.layer)]


class Pieces:
    """One allocation for several: next to a kernel each of torch's calls counts."""

    def __init__(self, like: Tensor, sizes: list[int]):
        self.starts = [0, *accumulate(sizes)]
        self.memory = like.new_empty(self.starts.pop())

    def view(self, place: int, *shape: int) -> Tensor:
        start = self.starts[place]
        return self.memory[start : start + math.prod(shape)].view(shape)

    def address(self, place: int) -> int:
        return self.memory.data_ptr() + self.memory.element_size() * self.starts[place]


class Angles:
    """The rotary embedding of all positions so far, from which a window takes a slice."""

    def __init__(self, trunk: Any):
        self.rotary, self.like, self.known = trunk.rotary, trunk.model.model.embed_tokens.weight, 0

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B or 1, W, D] of any positions [B or 1, W]."""
        return self.rotary(self.like, positions)

    def of(self, window: Any) -> tuple[Tensor, Tensor]:
        """Of a KVCache's window."""
        positions = window.positions
        if window.slots is not None:  # not one after the other
            return self.at(positions)
        first, size = window.first, window.first + positions.shape[1]
        if size > self.known:
            self.known = 2 * size
            self.cosines, self.sines = self.rotary(self.like, torch.arange(self.known)[None])
        return self.cosines[:, first:size], self.sines[:, first:size]


def output_rows(trunk: Any, ids: Tensor | None) -> OutputRows:
    linear = trunk.model.lm_head
    return kept(linear, ("rows", id(ids)), lambda: OutputRows(linear, ids))


def kept(linear: CompiledLinear, key: Any, make: Callable[[], Any]) -> Any:
    """What was made for a compiled trunk, which lives as long as that form does."""
    if key not in linear.made:
        linear.made[key] = make()
    return linear.made[key]


def depths_of(trunk: Any, head: Any, states: Tensor) -> Depths | None:
    """A head as the kernel drafts with it on states [B, W, H]; None where its modules are to be called.

    That is where the network is not compiled, the head has no layers, or the columns are too many for rows of
    bytes.
    """
    depths, (batch, width) = compiled(trunk, head), states.shape[:2]
    if depths is None or (depths.most is not None and batch * width > depths.most):
        return None
    return depths


@torch.inference_mode()
def prepare(trunk: Any, head: Any) -> None:
    """Quantize a compiled head's weights now, so that no text waits for it."""
    if (depths := compiled(trunk, head)) is not None:
        for depth in range(1, head.depth + 1):
            depths.stage(depth)


def compiled(trunk: Any, head: Any) -> Depths | None:
    linear = trunk.model.lm_head
    if not isinstance(linear, CompiledLinear):
        return None
    return kept(linear, ("depths", id(head)), lambda: (head, new_depths(trunk, head)))[1]


def new_depths(trunk: Any, head: Any) -> Depths | None:
    if not isinstance(head.parts(trunk, 1).layer, CompiledLayer):
        return None
    return Depths(trunk, lambda depth: head.parts(trunk, depth), head.draft_ids, head.chained)
