"""Where layers that run as one put their keys and values, as a kernel finds them.

Shapes: B rows, W tokens, S slots, K key heads of size D.
"""

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


class Stored:
    """Keys and values of a run of layers, as the kernel finds them: [B, K, S or more, D] each, all of one
    shape and without gaps."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]):
        self.layers = layers
        self.text_step, self.head_step = layers[0][0].stride()[:2]

    @cached_property  # a captured graph asks for none
    def pointers(self) -> Any:
        tensors = [tensor for pair in self.layers for tensor in pair]
        return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a run of layers puts its keys and values, and how many slots there are to look at."""

    stored: Stored
    size: int  # S
    first: int = 0  # the first token's slot
    slots: Tensor | None = None  # [B, W] every token's slot, where they do not follow each other


class Own:
    """Keys and values of texts that nothing goes before; every layer uses the same memory."""

    def storage(self, layers: Sequence[int], hidden: Tensor, heads: int, size: int) -> Storage:
        batch, width = hidden.shape[:2]
        keys, values = hidden.new_empty(2, batch, heads, width, size)
        return Storage(Stored([(keys, values)] * len(layers)), width)
