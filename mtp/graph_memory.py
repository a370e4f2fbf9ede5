"""Tensors that captured graphs know by their addresses: keys and values of texts, and a step's inputs.

Shapes: B rows, W nodes, P nodes after padding, S slots, K key heads, H hidden size, D head dimension.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp.storage import Storage

LEAST_SLOTS = 512  # fewer would make graphs for many small buffers
Pair = tuple[Tensor, Tensor]  # keys and values [B, K, S, D]


@dataclass(slots=True)
class Place:
    """Buffers, and the cache that they serve now."""

    pair: Pair
    owner: Any  # a weak reference: a cache that is gone has left its place


class Memory:
    """Buffers for keys and values that one cache after the other moves into.

    Two caches that live at once get buffers of their own, so each sees its own text only.
    """

    def __init__(self) -> None:
        self.places: dict[Any, list[Place]] = {}

    def hold(self, index: int, pair: Pair, cache: Any) -> Pair:
        """Layer `index` of a cache, moved into a place unless it lies in one."""
        shelf = self.places.setdefault((index, pair[0].shape, pair[0].dtype), [])
        for place in shelf:
            if place.pair[0] is pair[0]:
                return pair
        free = next((one for one in shelf if one.owner() in (None, cache)), None)
        if free is None:
            with torch.inference_mode(False):  # so that it may be written to outside of it as well
                free = Place((torch.empty_like(pair[0]), torch.empty_like(pair[1])), None)
            shelf.append(free)
        free.owner = weakref.ref(cache)
        for buffer, old in zip(free.pair, pair, strict=True):
            buffer.copy_(old)  # all of it: nothing that an earlier text left may be no number
        return free.pair


class Inputs:
    """What a pass over P nodes of B rows reads, at fixed addresses.

    Nodes beyond the given ones repeat the last one, slot and all: its keys are written over by the same.
    """

    def __init__(self, hidden: Tensor, cosines: Tensor, wide: int, size: int):
        batch, _, features = hidden.shape
        device = hidden.device
        with torch.inference_mode(False):
            self.hidden = torch.zeros(batch, wide, features, dtype=hidden.dtype, device=device)
            self.cosines = torch.zeros(batch, wide, cosines.shape[-1], dtype=cosines.dtype, device=device)
            self.sines = torch.zeros_like(self.cosines)
            self.slots = torch.zeros(batch, wide, dtype=torch.long, device=device)
            self.mask = torch.zeros(batch, 1, wide, size, dtype=torch.bool, device=device)
            self.rows = torch.arange(batch, device=device)[:, None]
            self.steps = torch.arange(wide, device=device)
            self.steps = torch.minimum(self.steps, self.steps[:, None])  # row W-1: 0, 1, ..., W-1, W-1, ...
            self.places = torch.arange(size, device=device)

    def fill(self, hidden: Tensor, rotary: Pair, mask: Tensor | None, storage: Storage) -> None:
        """hidden [B, W, H], rotary two of [B or 1, W, D], mask [B or 1, 1, W, S] or None: up to itself."""
        for buffer, given in zip((self.hidden, self.cosines, self.sines), (hidden, *rotary), strict=True):
            repeat(buffer, given)
        start = storage.first if storage.slots is None else storage.slots[:, :1]
        self.slots.copy_(self.steps[hidden.shape[1] - 1] + start)
        if mask is None:
            self.mask.copy_((self.places <= self.slots[:, :, None])[:, None])
        else:
            self.mask.zero_()
            repeat(self.mask[:, 0, :, : storage.size], mask[:, 0])


def repeat(buffer: Tensor, given: Tensor) -> None:
    """Fill buffer [B, P, ...] with given [B or 1, W, ...] and, beyond, with its last entry.

    >>> buffer = torch.zeros(1, 4)
    >>> repeat(buffer, torch.tensor([[5, 6]]))
    >>> buffer
    tensor([[5., 6., 6., 6.]])
    """
    width = given.shape[1]
    buffer[:, :width] = given
    if width < buffer.shape[1]:
        buffer[:, width:] = given[:, -1:]
