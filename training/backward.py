"""Forward and backward over trunk and heads with the logits of one head at a time (arXiv 2404.19737, sec. 2).

The trunk runs once. Each family of readouts begins at its states as at constants and leaves its gradient
there; only then does the gradient go back through the trunk, once for all. Heads side by side come and go one
after the other. Where depth k is made of depth k-1, all depths run, then each forms its logits and the
gradient of its own state, and one pass back through the modules, from the last, adds up what they send each
other. Gradients are those of the sum of all losses. Shapes: B rows, T tokens, H hidden size, D depths.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp.readout import Readout
from training.distances import rejected_by, rejected_on_text
from training.losses import HeadLoss
from training.readings import Reading, feature_gradient, gradient, law_at_depth, read
from training.targets import Targets, shift

States = dict[int, Tensor]  # tap -> [B, T, H]


@dataclass(frozen=True, slots=True)
class Family:
    """The readouts of one head, or the trunk's own, and what each of their losses weighs."""

    name: str  # "trunk", "sequential", ...
    readouts: Callable[[States], Iterable[Readout]]
    weights: list[float]
    loss: HeadLoss | None = None  # None: the plain next-token loss, as at the trunk's exits
    chained: bool = False
    detached: bool = False  # its gradient stops before the trunk

    @property
    def kind(self) -> str:
        return self.loss.kind if self.loss else "ce"

    @property
    def eta(self) -> float:
        return self.loss.eta if self.loss else 0.0

    def feature(self, depth: int) -> float:
        """What the distance of a foretold state weighs."""
        return self.loss.feature * self.loss.decay ** (depth - 1) if self.loss else 0.0

    def full_name(self, readout: Readout) -> str:
        return self.name if self.name == "trunk" else f"{self.name}/{readout.name}"


@dataclass(frozen=True, slots=True)
class Text:
    """What a micro-batch says of itself: targets, what each counts, and the trunk's law at every position."""

    targets: dict[int, Targets]  # by depth
    scales: dict[int, Tensor]  # 1 / targets of the whole batch, by depth
    state: Tensor  # [B, T, H] the trunk's final one, a constant
    matrix: Tensor  # [V, H] the trunk's output matrix
    normaliser: Tensor | None = None  # [B, T] of the trunk's laws, where a head drafts from a part of them

    def share(self, weight: float, depth: int) -> Tensor | None:
        """What one target of a depth counts with this weight; None: nothing."""
        return weight * self.scales[depth] if weight else None

    def reading(self, readout: Readout) -> Reading:
        return Reading(
            readout.hidden,
            self.matrix if readout.matrix is None else readout.matrix,
            self.targets[readout.depth],
            law_at_depth(self.state, readout.depth),
            self.matrix.detach(),
            readout.ids,
            self.normaliser_at(readout),
        )

    def normaliser_at(self, readout: Readout) -> Tensor | None:
        if readout.ids is None or self.normaliser is None:
            return None
        return shift(self.normaliser, readout.depth, 0)


Look = Callable[[str, Reading], None]  # is shown every reading by its name


def family_backward(family: Family, states: States, text: Text, look: Look | None = None) -> None:
    """Add the gradients of a family's losses to its weights, to the matrices and to the states [B, T, H]."""
    together = family.chained or (family.loss is not None and family.loss.coupled)
    readouts, weights = iter(family.readouts(states)), iter(family.weights)
    groups: Iterable[list[Readout]] = [list(readouts)] if together else ([one] for one in readouts)
    for group in groups:
        readings = [text.reading(readout) for readout in group]
        shares = [text.share(next(weights), readout.depth) for readout in group]
        found = gradients(family, group, readings, shares, text)
        if look is not None:
            for readout, reading in zip(group, readings, strict=True):
                look(family.full_name(readout), reading)
        back([(readout.hidden, value) for readout, value in zip(group, found, strict=True)])


def back(pairs: list[tuple[Tensor, Tensor | None]]) -> None:
    """Go back through the graphs of these states [B, T, H] with their gradients, where there are any."""
    real = [(state, value) for state, value in pairs if value is not None and state.requires_grad]
    if real:
        torch.autograd.backward([state for state, _ in real], [value for _, value in real])


def gradients(
    family: Family, group: list[Readout], readings: list[Reading], shares: list[Tensor | None], text: Text
) -> list[Tensor | None]:
    """For each readout the gradient of all its losses in its state [B, T, H]; None where it has none."""
    found = []
    for readout, reading, factors in zip(
        group, readings, coefficients(family, readings, shares), strict=True
    ):
        parts = [] if factors is None else [gradient(reading, family.kind, factors, family.eta)]
        if readout.feature is not None and (weight := family.feature(readout.depth)):
            foretold = feature_gradient(readout.hidden, readout.feature.detach(), reading.targets.valid)
            parts.append(foretold * (weight * text.scales[readout.depth]).to(foretold.dtype))
        found.append(sum(parts[1:], start=parts[0]) if parts else None)
    return found


def coefficients(
    family: Family, readings: list[Reading], shares: list[Tensor | None]
) -> Iterator[Tensor | None]:
    """For each reading the factors [Q, N] of its quantities; None where it weighs nothing now."""
    some = [share for share in shares if share is not None]
    if family.loss is not None and family.loss.coupled and some:
        every = [torch.zeros_like(some[0]) if share is None else share for share in shares]
        yield from chain_coefficients(family.kind, readings, torch.stack(every))
        return
    for reading, share in zip(readings, shares, strict=True):
        yield None if share is None else share * reading.targets.valid.flatten()[None]


def chain_coefficients(kind: str, readings: list[Reading], shares: Tensor) -> Iterator[Tensor]:
    """How a loss over whole drafts moves with each depth's quantities: [Q, N] by depth.

    A first pass reads alpha (and the chance that the text's token is accepted) at every depth, without a
    graph. The loss is a function of these few numbers, so its derivatives in them are the constants with
    which the second pass, depth by depth, weighs the quantities' own gradients: the chain rule, exactly.
    shares [D] weigh the depths.
    """
    found = torch.stack([read(reading, kind) for reading in readings]).requires_grad_()  # [D, Q, N]
    counted = torch.stack([reading.targets.valid.flatten() for reading in readings])
    with torch.enable_grad():
        if kind == "tv_chain":
            rejected = rejected_by(found[:, 0], counted)
        else:
            rejected = rejected_on_text(found[:, 0], found[:, 1], counted)
        loss = (shares[:, None] * rejected).sum()
    yield from torch.autograd.grad(loss, found)[0]


def fresh(states: States) -> States:
    """The states as a family sees them: constants that collect its gradient."""
    return {tap: state.detach().requires_grad_(state.requires_grad) for tap, state in states.items()}


def collected(states: States) -> States:
    """The gradients that a family left at its states."""
    return {tap: state.grad for tap, state in states.items() if state.grad is not None}


def add_to(total: States, more: States) -> None:
    for tap, value in more.items():
        total[tap] = total[tap] + value if tap in total else value


@contextmanager
def no_gradient_to(module: nn.Module, wanted: bool) -> Iterator[None]:
    """While it lasts, what is computed with the module's weights carries no gradient to them."""
    trained = [parameter for parameter in module.parameters() if wanted and parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
