"""What a step trains: which readouts there are, what each weighs now, and the passes over one micro-batch.

Shapes: B rows, T tokens, H hidden size, L layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mtp import Network, UserError
from mtp.readout import Readout
from mtp.trunk import Trunk
from training.backward import (
    Family,
    States,
    Text,
    add_to,
    collected,
    family_backward,
    fresh,
    no_gradient_to,
)
from training.losses import HeadLoss, Objective
from training.packing import Rows
from training.readings import Reading, measured, normalisers
from training.targets import Batch, may_see, targets_by_depth

Sums = dict[str, Tensor]  # name -> [4] of `measured`
# is shown the family's name, its gradient at the taps, and the trunk's states with their graph
Watch = Callable[[str, States, States], None]


class Plan:
    """The heads named in `losses` on a network, and the trunk unless it is frozen.

    A head whose loss is None has no weights of its own: its readouts are exits of the trunk, which the
    objective weighs (LayerSkip's J, in place of the trunk's plain loss).
    """

    def __init__(
        self,
        network: Network,
        losses: dict[str, HeadLoss | None],
        objective: Objective,
        *,
        max_steps: int,
        frozen: bool = False,
    ):
        check_trainable(network, losses, objective, frozen)
        self.network, self.losses, self.objective = network, losses, objective
        self.max_steps, self.frozen = max_steps, frozen

    @property
    def trunk(self) -> Trunk:
        return self.network.trunk

    def head(self, name: str) -> Any:
        return self.network.heads[name]

    @property
    def taps(self) -> tuple[int, ...]:
        wanted = {tap for name in self.losses for tap in self.head(name).taps}
        return tuple(sorted(wanted | {self.trunk.num_layers}))

    @property
    def depths(self) -> range:
        return range(1 + max((getattr(self.head(name), "depth", 0) for name in self.losses), default=0))

    def layer_weights(self, step: int) -> list[float]:
        """Weight of the next-token loss at each layer, the last being the trunk's own."""
        layers = self.trunk.num_layers
        if self.frozen:
            return [0.0] * layers
        if any(loss is None and name not in self.objective.detach for name, loss in self.losses.items()):
            return self.objective.layer_weights(layers, step=step, max_steps=self.max_steps)
        return [0.0] * (layers - 1) + [1.0]

    def families(self, batch: Batch, step: int) -> Iterator[Family]:
        """The trunk's own readout of a micro-batch and every head's, with what they weigh at this step."""
        trunk, last, mask = self.trunk, self.trunk.num_layers, may_see(batch)
        *of_layers, of_trunk = self.layer_weights(step)
        yield Family("trunk", lambda states: [Readout("trunk", 0, states[last])], [of_trunk])
        for name, loss in self.losses.items():
            head, detached = self.head(name), name in self.objective.detach
            if loss is not None:
                weights = loss.weights(getattr(head, "depth", 1), step / self.max_steps)
            else:
                weights = [0.0 if detached else of_layers[layer - 1] for layer in head.taps]

            def readouts(states: States, head: Any = head) -> Iterator[Readout]:
                return head.readouts(trunk, batch["tokens"], states, mask=mask)

            yield Family(name, readouts, weights, loss, chained=head.chained, detached=detached)

    def check_targets(self, loader: Any) -> None:
        """UserError where a depth that is trained has no target in all of a loader's rows, if it has rows."""
        rows: Any = getattr(loader, "rows", getattr(loader, "dataset", None))
        rows = getattr(rows, "rows", rows)  # those with states hold them
        for depth in self.depths if isinstance(rows, Rows) else ():
            if not rows.trainable(depth):
                raise UserError(
                    f"data: no document has a token to learn with {depth + 1} before it in its row of "
                    f"{rows.row_length}, so depth {depth} has no target; use longer rows or fewer depths"
                )

    def counts(self, batch: Batch) -> Tensor:
        """How many targets each depth 0, 1, ... has: [D+1]."""
        return torch.stack([targets.count for targets in targets_by_depth(batch, self.depths).values()])

    def states(self, batch: Batch, keep: Tensor | None = None) -> States:
        """The trunk's states at the taps, from the batch where it has them; keep [L, B] is layer dropout."""
        if any(key.startswith("state_") for key in batch):
            return given_states(batch, self.taps, self.trunk, frozen=self.frozen)
        mask = may_see(batch)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.trunk(batch["tokens"], mask=mask, taps=self.taps, keep=keep, logits=False).states

    def text(self, batch: Batch, states: States, scales: dict[int, Tensor]) -> Text:
        targets = targets_by_depth(batch, self.depths)
        state, matrix = states[self.trunk.num_layers].detach(), self.trunk.model.lm_head.weight
        some = any(getattr(self.head(name), "draft_ids", None) is not None for name in self.losses)
        return Text(targets, scales, state, matrix, normalisers(state, matrix) if some else None)

    def backward(
        self,
        batch: Batch,
        step: int,
        scales: dict[int, Tensor],
        *,
        keep: Tensor | None = None,
        only: str | None = None,
        sums: Sums | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Add a micro-batch's gradient to the weights: of all families, or of `only` one.

        scales are what a target of each depth counts; `sums` collects what `measured` finds on the way.
        """
        states = self.states(batch, keep)
        text = self.text(batch, states, scales)
        total: States = {}

        def look(name: str, reading: Reading) -> None:
            if sums is not None:
                add(sums, {name: measured(reading)})

        for family in self.families(batch, step):
            if only not in (None, family.name):
                continue
            seen = fresh(states)
            with no_gradient_to(self.trunk, family.detached):
                own = {tap: state.detach() for tap, state in seen.items()} if family.detached else seen
                family_backward(family, own, text, look)
            found = collected(seen)
            add_to(total, found)
            if watch is not None:
                watch(family.name, found, states)
        if total:
            torch.autograd.backward([states[tap] for tap in total], list(total.values()))

    @torch.no_grad()
    def measure(self, batch: Batch, step: int) -> Sums:
        """name -> [4] of `measured` for every readout of a micro-batch."""
        states = self.states(batch)
        text, sums = self.text(batch, states, {}), Sums()
        for family in self.families(batch, step):
            for readout in family.readouts(states):
                add(sums, {family.full_name(readout): measured(text.reading(readout))})
        return sums


def given_states(batch: Batch, taps: tuple[int, ...], trunk: Trunk, *, frozen: bool) -> States:
    """The states that a batch brings along as state_<tap> [B, T, H]; only of a trunk that does not change."""
    if not frozen:
        raise UserError("data: the batches bring states of the trunk, which only a frozen trunk can be given")
    if missing := [tap for tap in taps if f"state_{tap}" not in batch]:
        raise UserError(f"data: the batches bring states of the trunk, but not state_{missing[0]}")
    return {tap: batch[f"state_{tap}"].to(trunk.dtype) for tap in taps}


def check_trainable(
    network: Network, losses: dict[str, HeadLoss | None], objective: Objective, frozen: bool
) -> None:
    """Refuse a run that would train nothing, or that names heads which are not there."""
    if unknown := sorted(set(objective.detach) - set(losses)):
        raise UserError(
            f"objective.detach names {unknown[0]}, which is not one of the heads trained: {sorted(losses)}"
        )
    for name, loss in losses.items():
        own = any(True for _ in network.heads[name].parameters())
        if own and loss is None:
            raise UserError(f"heads.{name}.loss is null, but this head has weights of its own to train")
        if loss is not None and not own:
            raise UserError(f"heads.{name}.loss must be null: this head has no weights of its own to train")
        if loss is not None and loss.feature and not getattr(network.heads[name], "foretells", False):
            raise UserError(
                f"heads.{name}.loss.feature={loss.feature} is for heads that foretell the trunk's states, "
                "such as eagle; this one does not"
            )
    if frozen and (ignored := objective.for_trunk()):
        raise UserError(
            f"objective.{ignored} is about training the trunk, which trunk.frozen=true leaves alone"
        )
    if frozen and not any(losses.values()):
        raise UserError(
            "head: the trunk is frozen and no head with weights is trained, so there is nothing to train"
        )


def add(sums: Sums, more: Sums) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value
