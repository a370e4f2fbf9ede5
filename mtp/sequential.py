"""DeepSeek-V3's sequential MTP modules (arXiv 2412.19437, section 2.2, equations 21-25).

Shapes: B rows, T tokens, H hidden size.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from mtp.block import Block, initialise, new_norm
from mtp.draft_vocab import DraftVocab, add_draft_ids, read_out, stored_option
from mtp.drafting import Columns, Parts, picked
from mtp.errors import check_whole
from mtp.readout import Readout
from mtp.trunk import Keys, Trunk


class SequentialModule(nn.Module):
    """One module: h^k_j = TRM_k(M_k [norm(Emb(t_{j+k})) ; norm(h^{k-1}_j)]).

    The parts carry DeepSeek's checkpoint names. The paper writes [hidden ; embedding]; the published weights
    have [embedding ; hidden], and so does this module.
    """

    def __init__(self, trunk: Trunk):
        super().__init__()
        size = trunk.hidden_size
        self.enorm = new_norm(trunk)
        self.hnorm = new_norm(trunk)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        initialise(self.eh_proj, trunk)
        self.block = Block(trunk)
        self.norm = new_norm(trunk)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Keys | None = None,
    ) -> Tensor:
        """hidden h^{k-1}_j and embedding Emb(t_{j+k}), both [B, T, H] -> h^k_j before its norm, fed on as it
        is."""
        joined = torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1)
        return self.block(self.eh_proj(joined), rotary, mask, cache)


class Sequential(nn.Module):
    """D modules in a row on the trunk's final state; embedding and output matrix are the trunk's.

    Depth k at position j is fed token j+k and predicts token j+1+k. The rotary position is j at every depth.
    Beyond the last module the last one is applied again; with `repeat` K > D the head is trained for that
    too, down to depth K, on its own outputs (FastMTP, arXiv 2509.18362, has D = 1).

    Each depth has keys and values of its own, also where it shares its module: at depth k position j looks at
    what depth k made of positions 0 ... j. That is what a row of true tokens gives in training, where each
    depth is one causal pass, and what drafting keeps in one stream a depth.
    """

    kind = "sequential"
    chained = True
    draft_ids: Tensor | None

    def __init__(
        self, trunk: Trunk, depth: int = 4, repeat: int | None = None, draft_vocab: DraftVocab = None
    ):
        super().__init__()
        check_whole("sequential head: depth", depth, 1)
        if repeat is not None:
            check_whole("sequential head: repeat", repeat, depth)
        self.options = {"depth": depth, "repeat": repeat, "draft_vocab": stored_option(draft_vocab)}
        self.taps = (trunk.num_layers,)
        self.stages = nn.ModuleList(SequentialModule(trunk) for _ in range(depth))
        add_draft_ids(self, trunk, draft_vocab, self.kind)
        self.depth = repeat or depth

    def stage(self, depth: int) -> SequentialModule:
        """The module for depth k = 1, 2, ...; beyond the last one the last one again."""
        return cast(SequentialModule, self.stages[min(depth, len(self.stages)) - 1])

    def readouts(
        self,
        trunk: Trunk,
        tokens: Tensor,
        states: dict[int, Tensor],
        depth: int | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Iterator[Readout]:
        """Every depth at every position of tokens [B, T], the true tokens fed in.

        With T = 6, depth 2 at position 3 is fed token 5 and is about token 6, which the row does not have; at
        position 4 it would be fed token 6: that state is meaningless, and being causal it spoils nothing
        before it.
        """
        embedded = trunk.embed(tokens)
        rotary = trunk.rotary(embedded, torch.arange(tokens.shape[1], device=tokens.device)[None])
        hidden = states[trunk.num_layers]
        for k in range(1, (depth or self.depth) + 1):
            module = self.stage(k)
            hidden = module(hidden, embedded.roll(-k, dims=1), rotary, mask)
            yield Readout(f"depth{k}", k, module.norm(hidden), ids=self.draft_ids)

    def parts(self, trunk: Trunk, depth: int) -> Parts:
        stage = self.stage(depth)
        return Parts(stage.block.layer, stage.norm, (stage.enorm, stage.hnorm, stage.eh_proj))

    def step(self, trunk: Trunk, depth: int, columns: Columns) -> tuple[Tensor, Tensor]:
        """Depth k on columns: its states [B, W, H], and its logits [B, C, V] where they are read out."""
        width = columns.states.shape[1]
        fed = trunk.embed(columns.line[:, columns.offset : columns.offset + width])
        stream = columns.cache.layer(depth - 1)
        states = self.stage(depth)(columns.states, fed, columns.rotary, columns.mask, stream)
        return states, self.logits(trunk, depth, picked(states, columns.read))

    def logits(self, trunk: Trunk, depth: int, hidden: Tensor) -> Tensor:
        """What depth k = 1, 2, ... says of its module's output [..., H]: [..., V], -inf where it may not
        draft."""
        return read_out(trunk, self.stage(depth).norm(hidden), self.draft_ids)


def build(
    trunk: Trunk, depth: int = 4, repeat: int | None = None, draft_vocab: DraftVocab = None
) -> Sequential:
    return Sequential(trunk, depth, repeat, draft_vocab)
