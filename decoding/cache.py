"""KVCache: keys and values of committed tokens, then scratch slots for the nodes of one step.

The only file that Hugging Face layers talk to as a cache: they call `update`. Every row has its committed
tokens in slots 0 ... length-1 without gaps, so rows of different lengths lie side by side and dropping
scratch costs nothing. Shapes: B rows, W nodes run at once, S slots looked at, heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.tree import ancestors, depths, is_chain
from mtp.graph_memory import LEAST_SLOTS, Memory
from mtp.storage import Storage, Stored


@dataclass(frozen=True, slots=True)
class Window:
    """Where the nodes of one forward pass lie."""

    positions: Tensor  # [B or 1, W] for the rotary embedding
    mask: Tensor | None  # [B or 1, 1, W, S] True where a node may look; None: everything up to itself
    slots: Tensor | None  # [B, W] where keys go; None: the same slice for all rows
    first: int  # that slice's start
    size: int  # S


class KVCache:
    """Preallocated keys and values by layer; `open` a window, run layers, then `commit` what was accepted."""

    def __init__(self, batch_size: int, device: torch.device, capacity: int = 64):
        self.lengths = [0] * batch_size  # committed tokens by row
        self.device = device
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # [B, heads, capacity, D] each
        self.stored: dict[tuple[int, ...], Stored] = {}  # some of them as the kernel finds them
        self.numbers = torch.arange(capacity, device=device)[None]  # [1, capacity] 0, 1, 2, ...
        self.window: Window | None = None

    def open(
        self, count: int, *, first: int = 0, parents: Tensor | None = None, causal: bool = False
    ) -> Window:
        """Scratch slots for nodes first ... first+count-1, which hang in a chain, or as parents [B, N] (CPU)
        says, where N = first+count-1: of a tree that grows, the last nodes. With `causal` the mask of a chain
        after equally long texts is left out: Trunk.run asks for it (`causal_mask`) unless its layers see by
        themselves where the window lies.

        Row with 10 committed tokens, first=0, count=3: slots and positions 10, 11, 12; node 1 looks at slots
        0 ... 11. In a tree with parents [[0, 0]] node 2 has slot 12, position 11, and does not see slot 11.
        """
        if parents is not None and is_chain(parents):
            parents = None
        equal = len(set(self.lengths)) == 1
        start, size = self.lengths[0] + first, max(self.lengths) + first + count
        self._reserve(size)
        if equal:
            slots = self.numbers[:, start : start + count]
        else:
            slots = self._column() + self.numbers[:, first : first + count]
        if parents is None:
            positions, mask = slots, None if causal and equal else self._chain_mask(slots, size, equal)
        else:
            positions, mask = self._tree(parents.to(self.device), self._column(), size)
            positions, mask = positions[:, first:], mask[:, :, first:]
        self.window = Window(positions, mask, None if equal else slots, start, size)
        return self.window

    def _column(self) -> Tensor:
        """The rows' lengths [B, 1]."""
        return torch.tensor(self.lengths, device=self.device)[:, None]

    def causal_mask(self) -> Tensor | None:
        """The mask of a window that was opened without it."""
        window = self.window
        assert window is not None
        return self._chain_mask(window.positions, window.size, window.slots is None)

    def _chain_mask(self, slots: Tensor, size: int, equal: bool) -> Tensor | None:
        if equal and (slots.shape[1] == 1 or size == slots.shape[1]):
            return None  # one node sees all slots; nodes that fill all slots are causal by themselves
        return (torch.arange(size, device=self.device) <= slots[:, :, None])[:, None]

    def _tree(self, parents: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor]:
        seen = ancestors(parents)  # [B, W, W]
        relative = torch.arange(size, device=self.device) - length  # [B or 1, S] node number of a slot
        node = relative.clamp(0, seen.shape[2] - 1)[:, None].expand(len(seen), seen.shape[1], -1)
        inside = (relative >= 0) & (relative < seen.shape[2])
        mask = torch.where(inside[:, None], seen.gather(2, node), (relative < 0)[:, None])
        return length + depths(parents), mask[:, None]

    def _reserve(self, size: int) -> None:
        if size <= self.capacity:
            return
        self.capacity = 1 << (size - 1).bit_length()  # a power of two: few shapes, each captured once
        self.numbers = torch.arange(self.capacity, device=self.device)[None]
        self.stored.clear()
        for index, (keys, values) in self.layers.items():  # one by one: the old go as the new come
            self.layers[index] = (self._grown(keys), self._grown(values))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(old.shape[0], old.shape[1], self.capacity, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Store [B, heads, W, D] in the open window; return all slots that its mask speaks of."""
        window = self.window
        assert window is not None
        stored = self._layer(layer_idx, keys, keys.shape[1], keys.shape[3])
        for buffer, new in zip(stored, (keys, values), strict=True):
            if window.slots is None:
                buffer.narrow(2, window.first, new.shape[2]).copy_(new)
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                buffer[rows, :, window.slots] = new.transpose(1, 2)
        keys, values = stored
        return keys.narrow(2, 0, window.size), values.narrow(2, 0, window.size)

    def storage(self, layers: Sequence[int], hidden: Tensor, heads: int, size: int) -> Storage:
        """Instead of `update`, for a kernel that writes keys and values of the open window itself."""
        window = self.window
        assert window is not None
        key = (*layers,)
        if key not in self.stored:
            self.stored[key] = Stored([self._layer(index, hidden, heads, size) for index in key])
        return Storage(self.stored[key], window.size, window.first, window.slots)

    def settle(self, layers: Sequence[int], hidden: Tensor, heads: int, size: int, memory: Memory) -> Storage:
        """As `storage`, in buffers of `memory`, whose addresses a captured graph knows."""
        self._reserve(LEAST_SLOTS)
        self.stored.clear()
        for index in layers:
            self.layers[index] = memory.hold(index, self._layer(index, hidden, heads, size), self)
        return self.storage(layers, hidden, heads, size)

    def _layer(self, index: int, like: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
        if index not in self.layers:
            shape = (len(self.lengths), heads, self.capacity, size)
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[index]

    def layer(self, index: int) -> "LayerView":
        return LayerView(self, index)

    def commit(self, keep: Tensor) -> None:
        """Keep the nodes with keep [B, W] (bool, on the CPU) in order; all other scratch is dropped."""
        lines = keep.tolist()
        counts = [sum(line) for line in lines]
        if any(True in line[count:] for line, count in zip(lines, counts, strict=True)):  # not just a prefix
            self._gather(keep, max(counts))  # close the gaps
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _gather(self, keep: Tensor, most: int) -> None:
        order = keep.long().argsort(dim=1, descending=True, stable=True)[:, :most].to(self.device)
        length = torch.tensor(self.lengths, device=self.device)[:, None]
        rows = torch.arange(len(keep), device=self.device)[:, None]
        target = length + torch.arange(most, device=self.device)
        for keys, values in self.layers.values():
            for buffer in (keys, values):
                buffer[rows, :, target] = buffer[rows, :, length + order]

    def truncate(self, lengths: list[int]) -> None:
        """Forget committed tokens beyond these lengths."""
        if any(new > old or new < 0 for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot truncate {self.lengths} committed tokens to {lengths}")
        self.lengths = list(lengths)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        index = rows.to(self.device)
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        self.layers = {layer: (k[index], v[index]) for layer, (k, v) in self.layers.items()}
        self.stored.clear()


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of a cache for a block that does not know which of several streams it serves."""

    cache: KVCache
    index: int

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **options: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys, values, self.index, **options)

    def storage(self, layers: Sequence[int], hidden: Tensor, heads: int, size: int) -> Storage:
        return self.cache.storage([self.index], hidden, heads, size)

    def settle(self, layers: Sequence[int], hidden: Tensor, heads: int, size: int, memory: Memory) -> Storage:
        return self.cache.settle([self.index], hidden, heads, size, memory)
