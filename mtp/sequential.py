"""DeepSeek-V3's sequential MTP modules (arXiv 2412.19437, section 2.2, equations 21-25).

Shapes: B rows, T tokens, H hidden size.
"""

from typing import cast

import torch
from torch import Tensor, nn

from mtp.block import Block, initialise, new_norm
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
    """

    kind = "sequential"

    def __init__(self, trunk: Trunk, depth: int = 4):
        super().__init__()
        check_whole("sequential head: depth", depth, 1)
        self.options = {"depth": depth}
        self.taps = (trunk.num_layers,)
        self.stages = nn.ModuleList(SequentialModule(trunk) for _ in range(depth))

    @property
    def depth(self) -> int:
        return len(self.stages)

    def stage(self, depth: int) -> SequentialModule:
        """The module for depth k = 1, 2, ...; beyond the last one the last one again."""
        return cast(SequentialModule, self.stages[min(depth, self.depth) - 1])

    def readouts(
        self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor], depth: int | None = None
    ) -> list[Readout]:
        """Every depth at every position of tokens [B, T], the true tokens fed in.

        With T = 6, depth 2 at position 3 is fed token 5 and is about token 6, which the row does not have; at
        position 4 it would be fed token 6: that state is meaningless, and being causal it spoils nothing
        before it.
        """
        embedded = trunk.embed(tokens)
        rotary = trunk.rotary(embedded, torch.arange(tokens.shape[1], device=tokens.device)[None])
        hidden, found = states[trunk.num_layers], []
        for k in range(1, (depth or self.depth) + 1):
            module = self.stage(k)
            hidden = module(hidden, embedded.roll(-k, dims=1), rotary)
            found.append(Readout(f"depth{k}", k, module.norm(hidden)))
        return found


def build(trunk: Trunk, depth: int = 4) -> Sequential:
    return Sequential(trunk, depth)
