"""EAGLE's head (arXiv 2401.15077): the trunk's states, foretold one position at a time.

Shapes: B rows, T tokens, H hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mtp.block import Block, initialise
from mtp.draft_vocab import DraftVocab, add_draft_ids, read_out, stored_option
from mtp.errors import check_whole
from mtp.readout import Readout
from mtp.trunk import Keys, Trunk


class Eagle(nn.Module):
    """One block on fc([Emb(t_{j+1}) ; f_j]) makes f_{j+1}, from which the trunk's output matrix reads token
    j+2.

    The feature f is what the output matrix reads, the state after the trunk's final norm. EAGLE takes the
    same one (it calls it the state before the head): the matrix then reads a foretold feature as it stands.
    Where the trunk has not been, a foretold feature takes the place of f_j, so one block drafts any depth.
    With `rollout` R > 1 it is trained for that down to depth R, on its own features as in a draft (the
    training-time test of EAGLE-3, arXiv 2503.01840; HASS, arXiv 2408.15766).
    """

    kind = "eagle"
    chained = True
    foretells = True  # states of the trunk, which a loss can compare with the true ones
    draft_ids: Tensor | None

    def __init__(self, trunk: Trunk, rollout: int = 1, draft_vocab: DraftVocab = None):
        super().__init__()
        check_whole("eagle head: rollout", rollout, 1)
        self.options = {"rollout": rollout, "draft_vocab": stored_option(draft_vocab)}
        self.taps = (trunk.num_layers,)
        self.depth = rollout  # that training knows of
        add_draft_ids(self, trunk, draft_vocab, self.kind)
        self.fc = nn.Linear(2 * trunk.hidden_size, trunk.hidden_size)
        initialise(self.fc, trunk)
        self.block = Block(trunk)

    def forward(
        self,
        embedding: Tensor,
        feature: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Keys | None = None,
    ) -> Tensor:
        """Emb(t_{j+1}) and f_j, both [B, T, H] -> f_{j+1} as foretold; rotary position j."""
        return self.block(self.fc(torch.cat([embedding, feature], dim=-1)), rotary, mask, cache)

    def readouts(
        self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor], *, mask: Tensor | None = None
    ) -> Iterator[Readout]:
        """Depths 1 ... R at every position of tokens [B, T], the true tokens fed in, as a draft that starts
        there would see them.

        With T = 6, depth 1 at position 3 is slot 3: fed token 4 and f_3, it foretells f_4 and is about token
        5. Depth 2 at position 2 is slot 3 too: fed token 4 and what depth 1 foretold at slot 2, it looks at
        the true slots 0 ... 2 and at itself, foretells f_4 and is about token 5.
        """
        state, step = states[trunk.num_layers], None
        embedded = trunk.embed(tokens).roll(-1, dims=1)  # [B, T, H] by slot
        rotary = trunk.rotary(embedded, torch.arange(tokens.shape[1], device=tokens.device)[None])
        feature = state
        for k in range(1, self.depth + 1):
            step = Step(step)
            foretold = self(embedded, feature, rotary, step.mask(state, mask), step)
            here = foretold.roll(1 - k, dims=1)  # by the position that the draft starts from
            yield Readout(f"depth{k}", k, here, feature=state.roll(-k, dims=1), ids=self.draft_ids)
            feature = foretold.roll(1, dims=1)

    def logits(self, trunk: Trunk, hidden: Tensor) -> Tensor:
        """What a feature [..., H] says: [..., V], -inf where the head may not draft."""
        return read_out(trunk, hidden, self.draft_ids)


class Step:
    """The cache of one depth: keys and values of the depths before it, then its own, side by side.

    Depth r has columns (r-1) T ... r T - 1. A depth may run twice, as with activation checkpointing: what the
    depths after it look at is settled when they begin.
    """

    def __init__(self, before: "Step | None" = None):
        self.before: list[tuple[Tensor, Tensor]] = [] if before is None else [*before.before, *before.own]
        self.own: list[tuple[Tensor, Tensor]] = []  # [B, heads, T, D] two, once it has run

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        self.own = [(keys, values)]
        every_key, every_value = zip(*self.before, (keys, values), strict=True)
        return torch.cat(every_key, dim=2), torch.cat(every_value, dim=2)

    def mask(self, state: Tensor, seen: Tensor | None = None) -> Tensor | None:
        """[1, 1, T, k T] at depth k over state [B, T, H]: slot j looks at true slots up to j-k+1, then at one
        slot a depth; None at depth 1, which is causal. Of all that only what `seen` [B, 1, T, T] has.

        >>> second = Step(); second.before = [(torch.empty(0), torch.empty(0))]
        >>> second.mask(torch.empty(1, 3, 8))[0, 0].int().tolist()
        [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]
        """
        depth = len(self.before) + 1
        if depth == 1:
            return seen
        slot = torch.arange(state.shape[1], device=state.device)
        behind = slot[:, None] - slot  # [T, T] how far a key lies behind its query
        drafted = [behind == depth - step for step in range(2, depth + 1)]
        mask = torch.cat([behind >= depth - 1, *drafted], dim=1)[None, None]
        return mask if seen is None else mask & seen.repeat(1, 1, 1, depth)


def build(trunk: Trunk, rollout: int = 1, draft_vocab: DraftVocab = None) -> Eagle:
    return Eagle(trunk, rollout, draft_vocab)
