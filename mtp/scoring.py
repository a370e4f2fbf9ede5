"""A pass over a compiled trunk in one call, from tokens to logits and the best token of each.

Weights stream through the processor's caches and leave nothing else in them, so whatever is called after a
kernel starts cold and takes several times as long as it does alone: what can be made before it is.

Shapes: B rows, W tokens, H hidden size, V vocabulary, L layers.
"""

from typing import Any

import torch
from torch import Tensor

from mtp import kernel
from mtp.compiled import CompiledLayer
from mtp.compiled_linear import CompiledLinear, CompiledNorm
from mtp.drafting import Angles, Pieces, kept
from mtp.stacked import address
from mtp.storage import Own


class Scorer:
    """A compiled trunk as the kernel passes over it."""

    def __init__(self, trunk: Any):
        self.layers, self.linear, self.norm = [*trunk.layers], trunk.model.lm_head, trunk.model.model.norm
        self.embedding, self.angles = trunk.model.model.embed_tokens.weight, Angles(trunk)
        self.score = kernel.library().score

    def __call__(
        self,
        tokens: Tensor,
        first: int,
        states: Tensor | None,
        *,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        taps: tuple[int, ...],
        logits: bool,
    ) -> tuple[dict[int, Tensor], Tensor | None, Tensor | None]:
        """States by tap [B, W, H], logits [B, W, V] and their best tokens [B, W], as Trunk.forward has them.

        `first` < L layers were run before, and left `states` unless there were none. IndexError for a token
        beyond the vocabulary.
        """
        layer, whole, (batch, width) = self.layers[first], len(self.layers), tokens.shape
        inside = [tap for tap in taps if first < tap < whole]
        ends = tuple(sorted({tap - first for tap in [*inside, whole]}))
        rows, size, outputs = batch * width, self.embedding.shape[1], self.linear.matrix.outputs
        # What is embedded, the states at `ends`, the last one normed, logits, and what layers work in.
        memory = Pieces(
            self.embedding, [rows * size] * (len(ends) + 2) + [rows * outputs * logits, rows * layer.scratch]
        )
        hidden = memory.view(0, batch, width, size) if states is None else states.contiguous()
        storage = (cache or Own()).storage(range(first, whole), hidden, layer.keys, layer.size)
        window = getattr(cache, "window", None)
        known = mask is None and window is not None and window.positions is positions  # one after the other
        rotary = self.angles.of(window) if known else self.angles.at(positions)
        mask = None if mask is None else mask.contiguous()
        given = {"mask": mask, "rotary": tuple(map(Tensor.contiguous, rotary)), "storage": storage}
        what = layer.what(hidden, ends, **given, scratch=memory.address(-1), states=memory.address(1))
        tokens, best = tokens.contiguous(), tokens.new_empty(batch, width) if logits else None
        last = whole in taps or logits
        found = {first: hidden} if first in taps else {}
        found |= {tap: memory.view(1 + ends.index(tap - first), batch, width, size) for tap in inside}
        if whole in taps:
            found[whole] = memory.view(-3, batch, width, size)
        said = memory.view(-2, batch, width, outputs) if logits else None
        wrong = self.score(layer.struct, kernel.Pass(
            what, address(tokens) if states is None else None, address(self.embedding), len(self.embedding),
            address(self.norm.weight) if last else None, self.norm.epsilon, memory.address(-3),
            self.linear.matrix, memory.address(-2) if logits else None, address(best),
        ))  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"token {int(tokens.flatten()[wrong])} is not one of {len(self.embedding)}")
        return found, said, best


def scorer_of(trunk: Any, first: int, tokens: Tensor, mask: Tensor | None, cache: Any) -> Scorer | None:
    """What passes over a trunk from layer `first` on; None where its modules are to be called."""
    linear = trunk.model.lm_head
    if not isinstance(linear, CompiledLinear) or first >= trunk.num_layers or torch.is_grad_enabled():
        return None
    layer = trunk.layers[first]
    if not isinstance(layer, CompiledLayer) or not layer.takes(tokens, mask, cache):
        return None
    if not isinstance(trunk.model.model.norm, CompiledNorm):
        return None
    return kept(linear, "scorer", lambda: Scorer(trunk))
