"""Greedy drafting with the lower layers of a compiled trunk: all tokens of an early exit in one call.

Layers keep their own weights, so keys and states are the very bits that scoring would give; only the output
matrix is quantized. Shapes: B rows, S slots, H hidden size, D head dimension.
"""

from collections.abc import Sequence
from ctypes import POINTER, pointer
from typing import Any

from torch import Tensor, nn

from mtp import kernel
from mtp.compiled_linear import MOST_TOKENS, CompiledNorm
from mtp.drafting import Angles, Pieces, kept, output_rows
from mtp.stacked import address
from mtp.storage import Storage


class Exit:
    """Layers of the trunk as a greedy drafter: `below` layers, those of `above` that are kept, a norm."""

    def __init__(self, trunk: Any, below: int, above: Sequence[int], norm: CompiledNorm):
        self.indices, self.below, self.norm = [*range(below), *above], below, norm
        self.layers = [trunk.layers[index] for index in self.indices]
        self.embedding, self.angles = trunk.model.model.embed_tokens.weight, Angles(trunk)
        self.output = output_rows(trunk, None)
        structs = [pointer(layer.struct) for layer in self.layers]
        self.pointers = (POINTER(kernel.Layer) * len(structs))(*structs)
        self.run = kernel.library().draft_exit

    def greedy(self, root: Tensor, count: int, window: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """Draft `count` tokens after root [B] in the `window` of count+1 nodes that is open in the cache:
        tokens [B, count], and states [B, count+1, H] after the layers below."""
        layer, batch, nodes, size = self.layers[0], len(root), count + 1, self.embedding.shape[1]
        rows = batch * size
        memory = Pieces(
            self.embedding, [nodes * rows, batch * layer.scratch + rows, rows, batch * self.output.size]
        )
        states = memory.view(0, nodes, batch, size)
        tokens = root.new_empty(nodes, batch)
        tokens[0] = root
        found = tokens[1:].T, states.transpose(0, 1)  # made now: behind the kernel torch is cold
        like = states[0][:, None]  # [B, 1, H]
        storage = cache.storage(self.indices, like, layer.keys, layer.size)
        by_node = [angles.transpose(0, 1).contiguous() for angles in self.angles.of(window)]  # [n, B or 1, D]
        places = None if storage.slots is None else storage.slots.T.contiguous()  # [count+1, B]
        mask = None
        if window.mask is not None:
            mask = window.mask.permute(2, 0, 1, 3).contiguous()  # [count+1, B, 1, S]
        grows = mask is None
        what = layer.what(
            like, (1,), mask=None if mask is None else mask[0], rotary=[angles[0] for angles in by_node],
            storage=Storage(storage.stored, storage.size - count * grows, storage.first, places),
            scratch=memory.address(1), states=memory.address(0),
        )  # fmt: skip
        self.run(kernel.Exit(
            nodes, self.pointers, self.below, len(self.layers), what, grows, address(self.embedding),
            address(self.norm.weight), self.norm.epsilon, self.output.struct,
            memory.address(2), memory.address(3), address(tokens),
        ))  # fmt: skip
        return found


def exit_of(trunk: Any, below: int, above: Sequence[int], norm: nn.Module | None, batch: int) -> Exit | None:
    """Layers of a compiled trunk as a greedy drafter of B = `batch` rows; None where they are to be called.

    That is where the trunk is not compiled, more than a norm follows, or the rows are too many.
    """
    if not isinstance(norm, CompiledNorm) or batch > MOST_TOKENS:
        return None
    key = ("exit", below, tuple(above), id(norm))
    return kept(trunk.model.lm_head, key, lambda: Exit(trunk, below, above, norm))
