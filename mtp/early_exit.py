"""Layer-skip early exit (LayerSkip, arXiv 2404.16710): leave after some layers through the shared output
head.

Shapes: B rows, T tokens, H hidden size.
"""

import copy
from collections.abc import Iterator

from torch import Tensor, nn

from mtp.block import initialise
from mtp.errors import UserError, check_whole
from mtp.readout import Readout
from mtp.trunk import Trunk


class EarlyExit(nn.Module):
    """The trunk's own lower layers as a drafter: final norm and output matrix right after `exit_layer`
    layers.

    As it is it has no parameters: what makes the exit good is how the trunk was trained (exit loss, layer
    dropout). For a trunk that is not trained along there is an `adapter`: `norm`, a norm of the exit's own,
    or a rank R, which adds up(down(h)) to the state before that norm. A new adapter changes nothing: the norm
    begins as the trunk's, `up` at zero. It fits its own exit layer only.
    """

    kind = "early_exit"
    chained = False

    def __init__(self, trunk: Trunk, exit_layer: int | None = None, adapter: str | int | None = None):
        super().__init__()
        exit_layer = trunk.num_layers // 2 if exit_layer is None else exit_layer
        check_exit_layer(exit_layer, trunk.num_layers)
        check_adapter(adapter, trunk.hidden_size)
        self.options = {"exit_layer": exit_layer, "adapter": adapter}
        self.exit_layer = exit_layer
        self.taps = tuple(range(1, trunk.num_layers)) if adapter is None else (exit_layer,)
        self.norm: nn.Module | None = None
        self.change: nn.Module | None = None
        if adapter is not None:
            self.norm = copy.deepcopy(trunk.model.model.norm).requires_grad_(True)
        if isinstance(adapter, int):
            self.change = low_rank(trunk, adapter)

    def only_norm(self, trunk: Trunk) -> nn.Module | None:
        """The norm that all of the exit is, or None where it is more."""
        return None if self.change is not None else self.norm or trunk.model.model.norm

    def exit(self, trunk: Trunk, hidden: Tensor) -> Tensor:
        """State [..., H] after `exit_layer` layers -> what the output matrix reads [..., H]."""
        if self.norm is None:
            return trunk.norm(hidden)
        return self.norm(hidden if self.change is None else hidden + self.change(hidden))

    def readouts(
        self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor], *, mask: Tensor | None = None
    ) -> Iterator[Readout]:
        """The exit after each layer 1..L-1 at every position, or its own one with an adapter: all of them
        predict the next token (depth 0)."""
        for layer in self.taps:
            yield Readout(f"layer{layer}", 0, self.exit(trunk, states[layer]))


def low_rank(trunk: Trunk, rank: int) -> nn.Module:
    """H -> R -> H, at first zero."""
    size = trunk.hidden_size
    down, up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)
    initialise(down, trunk)
    nn.init.zeros_(up.weight)
    return nn.Sequential(down, up.to(device=trunk.device, dtype=trunk.dtype))


def check_exit_layer(exit_layer: object, num_layers: int) -> None:
    check_whole("exit_layer", exit_layer, 1, num_layers - 1)


def check_adapter(adapter: object, hidden_size: int) -> None:
    if adapter in (None, "norm"):
        return
    if isinstance(adapter, str):
        raise UserError(f"early_exit head: adapter={adapter!r} is not null, norm or a rank")
    check_whole("early_exit head: adapter", adapter, 1, hidden_size)


def build(trunk: Trunk, exit_layer: int | None = None, adapter: str | int | None = None) -> EarlyExit:
    return EarlyExit(trunk, exit_layer, adapter)
