"""EAGLE's head (arXiv 2401.15077): the trunk's states, foretold one position at a time.

Shapes: B rows, T tokens, H hidden size.
"""

import torch
from torch import Tensor, nn

from mtp.block import Block, initialise
from mtp.readout import Readout
from mtp.trunk import Keys, Trunk


class Eagle(nn.Module):
    """One block on fc([Emb(t_{j+1}) ; f_j]) makes f_{j+1}, from which the trunk's output matrix reads token
    j+2.

    The feature f is what the output matrix reads, the state after the trunk's final norm. EAGLE takes the
    same one (it calls it the state before the head): the matrix then reads a foretold feature as it stands.
    Where the trunk has not been, a foretold feature takes the place of f_j, so one block drafts any depth.
    """

    kind = "eagle"

    def __init__(self, trunk: Trunk):
        super().__init__()
        self.options: dict[str, int] = {}
        self.taps = (trunk.num_layers,)
        self.depth = 1  # that training knows of
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

    def readouts(self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor]) -> list[Readout]:
        """Depth 1 at every position of tokens [B, T], the true token and feature fed in.

        With T = 6, position 3 is fed token 4 and f_3, foretells f_4 and is about token 5.
        """
        state = states[trunk.num_layers]
        embedded = trunk.embed(tokens).roll(-1, dims=1)
        rotary = trunk.rotary(embedded, torch.arange(tokens.shape[1], device=tokens.device)[None])
        foretold = self(embedded, state, rotary)
        return [Readout("depth1", 1, foretold, feature=state.roll(-1, dims=1))]


def build(trunk: Trunk) -> Eagle:
    return Eagle(trunk)
