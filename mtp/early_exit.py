"""Layer-skip early exit (LayerSkip, arXiv 2404.16710): leave after some layers through the shared output
head."""

from torch import Tensor, nn

from mtp.errors import check_whole
from mtp.readout import Readout
from mtp.trunk import Trunk


class EarlyExit(nn.Module):
    """The trunk's own lower layers as a drafter: final norm and output matrix right after `exit_layer`
    layers.

    It has no parameters: what makes the exit good is how the trunk was trained (exit loss, layer dropout).
    """

    kind = "early_exit"

    def __init__(self, trunk: Trunk, exit_layer: int | None = None):
        super().__init__()
        exit_layer = trunk.num_layers // 2 if exit_layer is None else exit_layer
        check_exit_layer(exit_layer, trunk.num_layers)
        self.options = {"exit_layer": exit_layer}
        self.exit_layer = exit_layer
        self.taps = tuple(range(1, trunk.num_layers))

    def readouts(self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor]) -> list[Readout]:
        """The exit after each layer 1..L-1 at every position: all of them predict the next token (depth
        0)."""
        return [Readout(f"layer{layer}", 0, trunk.norm(states[layer])) for layer in self.taps]


def check_exit_layer(exit_layer: object, num_layers: int) -> None:
    check_whole("exit_layer", exit_layer, 1, num_layers - 1)


def build(trunk: Trunk, exit_layer: int | None = None) -> EarlyExit:
    return EarlyExit(trunk, exit_layer)
