"""Drafting with some of the trunk's own layers left out: nothing is trained, nothing is loaded.

Shapes: B rows, T calibration tokens, N draft nodes, H hidden size, L layers.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from decoding.branching import Chain, straight
from decoding.cache import KVCache
from decoding.draft import Context, Draft, no_draft
from decoding.layer_search import check_share, found
from mtp import Network, Trunk, UserError
from mtp.early_exit import EarlyExit
from mtp.exit_drafting import Exit, exit_of


class LayerSkip:
    """Drafts with the trunk without the layers `skip` (Draft & Verify 2309.08168, SWIFT 2410.06916).

    Layers below the first skipped one say of a node what they say in the whole trunk: their keys stay as
    scratch and their states are handed on, so scoring starts at that layer. The kept layers above read the
    true keys of committed tokens and write keys of drafts to the same scratch slots. Those are not the
    trunk's own, and none survives: scoring runs all layers from the first skipped one on, over root and every
    node, before anything is committed.

    `head` makes of the last kept layer's state what the output matrix reads; without one the trunk's norm
    does.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, trunk: Trunk, skip: tuple[int, ...], head: EarlyExit | None = None):
        self.trunk, self.skip, self.head = trunk, skip, head
        self.exit_layer = skip[0]
        self.upper = kept_above(skip, trunk.num_layers)
        self.cache: KVCache | None = None
        with torch.inference_mode():
            self._kernel(1)  # quantizes the output matrix now, so that no text waits for it

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.cache = cache

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        pass

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, max(context.room))
        if count <= 0:
            return no_draft(root)
        if context.takes_best and (kernel := self._kernel(len(root))) is not None:
            return self._greedy(kernel, root, count, context.room)
        drawn = Chain(context)
        states = [self._run(root, 0, drafting=True)]
        for depth in range(1, count + 1):
            token = drawn.draw(self.trunk.lm_head(self.leave(self.last))[:, 0])
            states.append(self._run(token, depth, drafting=depth < count))
        draft = drawn.draft(context.room)
        return Draft(draft.tokens, draft.parents, draft.q, self.exit_layer, torch.cat(states, dim=1))

    def leave(self, hidden: Tensor) -> Tensor:
        """States [..., H] after the last kept layer -> what the output matrix reads [..., H]."""
        return self.trunk.norm(hidden) if self.head is None else self.head.exit(self.trunk, hidden)

    def _kernel(self, batch: int) -> Exit | None:
        """All tokens of a greedy draft in one call, where the trunk is compiled for it."""
        norm = self.trunk.model.model.norm if self.head is None else self.head.only_norm(self.trunk)
        kept = [layer for first, last in self.upper for layer in range(first, last)]
        return exit_of(self.trunk, self.exit_layer, kept, norm, batch)

    def _greedy(self, kernel: Exit, root: Tensor, count: int, room: list[int]) -> Draft:
        assert self.cache is not None
        window = self.cache.open(count + 1, causal=True)
        parents = straight(count, room, root.device)
        tokens, states = kernel.greedy(root, count, window, self.cache)
        return Draft(tokens, parents, None, self.exit_layer, states)

    def _run(self, token: Tensor, node: int, *, drafting: bool) -> Tensor:
        """token [B] as this node -> its state [B, 1, H] after exit_layer; where a token is drafted after it,
        `last` [B, 1, H] is what the kept layers above make of that."""
        assert self.cache is not None
        window = self.cache.open(1, first=node)
        hidden = self.trunk.embed(token[:, None])
        for first, last in ((0, self.exit_layer), *(self.upper if drafting else ())):
            hidden, _ = self.trunk.run(
                hidden, first, last, positions=window.positions, mask=window.mask, cache=self.cache
            )
            if last == self.exit_layer:
                state = hidden
        self.last = hidden
        return state

    def select(self, rows: Tensor) -> None:
        pass


def kept_above(skip: tuple[int, ...], num_layers: int) -> list[tuple[int, int]]:
    """Layers above the first skipped one that stay, as (first, last + 1).

    >>> kept_above((2, 3, 6), 8)
    [(4, 6), (7, 8)]
    """
    return [(low + 1, high) for low, high in pairwise((*skip, num_layers)) if low + 1 < high]


def check_skip(skip: object, num_layers: int) -> tuple[int, ...]:
    """The layers to leave out, in order; UserError where one is none of layers 1 ... L-1."""
    if num_layers < 2:
        raise UserError("drafter=layer_skip: the trunk has one layer only, so none can be left out")
    allowed = f"whole numbers from 1 to {num_layers - 1}"
    if isinstance(skip, str) or not isinstance(skip, Sequence) or not skip:  # Hydra's lists are no lists
        raise UserError(f"drafter.skip={skip!r} is not a list of {allowed}")
    for layer in skip:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer < num_layers:
            raise UserError(f"drafter.skip: {layer!r} is not one of the {allowed}")
    return tuple(sorted(set(skip)))


def build(
    network: Network, skip: Sequence[int] | None = None, share: float = 0.4, calibration: str | None = None
) -> LayerSkip:
    """skip: layers to leave out, counted from 0. None: `share` of all, found by a search on the text
    `calibration` (None: a built-in one), once in a process."""
    check_share(share)
    trunk = network.trunk
    if skip is None and trunk.num_layers > 1:
        left_out = found(network, share, calibration)
    else:
        left_out = check_skip(skip, trunk.num_layers)
    return LayerSkip(trunk, left_out)
