"""Meta's parallel heads (arXiv 2404.19737): one layer each, side by side on one state of the trunk.

Shapes: B rows, T tokens, H hidden size.
"""

import torch
from torch import Tensor, nn

from mtp.block import Block
from mtp.errors import check_whole
from mtp.readout import Readout
from mtp.trunk import Trunk


class Parallel(nn.Module):
    """D blocks that share the trunk's final norm and output matrix; head k at position i predicts token
    i+1+k.

    The paper's shared trunk ends before the last layer, and that layer is its head 1 (the next token). So the
    blocks read the state after layer L-1 by default (`tap`); they are the paper's heads 2, 3, ...
    """

    kind = "parallel"

    def __init__(self, trunk: Trunk, depth: int = 4, tap: int | None = None):
        super().__init__()
        tap = trunk.num_layers - 1 if tap is None else tap
        check_whole("parallel head: depth", depth, 1)
        check_whole("parallel head: tap", tap, 0, trunk.num_layers)
        self.options = {"depth": depth, "tap": tap}
        self.taps = (tap,)
        self.blocks = nn.ModuleList(Block(trunk, index) for index in range(depth))

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def readouts(self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor]) -> list[Readout]:
        """Every head at every position of tokens [B, T]; the heads see no token but through the trunk's
        state."""
        state = states[self.taps[0]]
        rotary = trunk.rotary(state, torch.arange(tokens.shape[1], device=tokens.device)[None])
        outputs = (block(state, rotary) for block in self.blocks)
        return [Readout(f"depth{k}", k, trunk.norm(hidden)) for k, hidden in enumerate(outputs, start=1)]


def build(trunk: Trunk, depth: int = 4, tap: int | None = None) -> Parallel:
    return Parallel(trunk, depth, tap)
