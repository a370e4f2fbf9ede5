"""Medusa's heads (arXiv 2401.10774): residual layers and an output matrix of their own for each depth.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from torch.nn.functional import silu

from mtp.errors import check_whole
from mtp.readout import Readout
from mtp.trunk import Trunk


class MedusaHead(nn.Module):
    """x + SiLU(W x + b), a few times over, then an own output matrix.

    W and b begin at zero and the matrix as a copy of the trunk's, so a new head says what the trunk says.
    """

    def __init__(self, trunk: Trunk, layers: int):
        super().__init__()
        size = trunk.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)
        self.layers.to(device=trunk.device, dtype=trunk.dtype)
        self.lm_head = copy.deepcopy(trunk.model.lm_head).requires_grad_(True)  # the trunk's may be frozen

    def forward(self, state: Tensor) -> Tensor:
        """State [..., H] -> what the output matrix reads [..., H]."""
        for layer in self.layers:
            state = state + silu(layer(state))
        return state


class Medusa(nn.Module):
    """D heads side by side on the trunk's final state; head k at position i predicts token i+1+k.

    They see neither each other's tokens nor, beyond that state, any other position.
    """

    kind = "medusa"
    chained = False

    def __init__(self, trunk: Trunk, depth: int = 4, layers: int = 1):
        super().__init__()
        check_whole("medusa head: depth", depth, 1)
        check_whole("medusa head: layers", layers, 0)
        self.options = {"depth": depth, "layers": layers}
        self.taps = (trunk.num_layers,)
        self.heads = nn.ModuleList(MedusaHead(trunk, layers) for _ in range(depth))

    @property
    def depth(self) -> int:
        return len(self.heads)

    def head(self, depth: int) -> MedusaHead:
        return cast(MedusaHead, self.heads[depth - 1])

    def readouts(
        self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor], *, mask: Tensor | None = None
    ) -> Iterator[Readout]:
        """Every head at every position of tokens [B, T], each with the matrix that reads it."""
        state = states[trunk.num_layers]
        for k in range(1, self.depth + 1):
            head = self.head(k)
            yield Readout(f"depth{k}", k, head(state), head.lm_head.weight)

    def logits(self, depth: int, state: Tensor) -> Tensor:
        """What head k = 1, 2, ... says of the trunk's state [B, H]: [B, V]."""
        head = self.head(depth)
        return head.lm_head(head(state))


def build(trunk: Trunk, depth: int = 4, layers: int = 1) -> Medusa:
    return Medusa(trunk, depth, layers)
