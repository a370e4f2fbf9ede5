"""One LightningModule for every mix of heads, on a trunk that is trained along or frozen.

Shapes: B rows, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from mtp import Network
from training.backward import States
from training.clock import Clock
from training.gradients import TapGradients, at_lower_taps, in_weights
from training.losses import HeadLoss, Objective
from training.metrics import means
from training.optimization import Optimization, check
from training.plan import Plan, Sums, Watch, add
from training.processes import add_up
from training.schedule import kept_layers
from training.sharding import clip, shard, sum_pieces
from training.targets import Batch

__all__ = ["Optimization", "Training", "check"]

Report = Callable[[int, dict[str, float]], None]  # after every step; with numbers where there are some


class Training(LightningModule):
    """Trains the heads named in `losses`, and the trunk unless it is frozen; other heads stay as they are.

    Optimization is manual, because the mean over a batch needs the number of all its targets before its first
    micro-batch is differentiated, and because a backward pass has many parts.
    """

    def __init__(
        self,
        network: Network,
        losses: dict[str, HeadLoss | None],
        objective: Objective,
        optimization: Optimization,
        *,
        frozen: bool = False,
        seed: int = 0,
        log_every: int = 50,
        reports: Sequence[Report] = (),
    ):
        super().__init__()
        self.automatic_optimization = False
        self.plan = Plan(network, losses, objective, max_steps=optimization.max_steps, frozen=frozen)
        self.network, self.optimization = network, optimization
        self.frozen, self.seed, self.log_every, self.reports = frozen, seed, log_every, list(reports)
        network.train().requires_grad_(False)
        if frozen:  # what is written before the first step must not depend on dropout in attention
            network.trunk.eval()
        network.trunk.requires_grad_(not frozen)
        for name in losses:
            network.heads[name].requires_grad_(True)
        self.totals: Sums = {}
        self.clock, self.at_taps = Clock(), TapGradients()
        self.latest: dict[str, float] = {}  # what was logged last
        self.validated = -1  # the step at which it was validated last
        if frozen:  # a checkpoint holds what is trained; the trunk is where it was loaded from
            self.strict_loading = False

    @property
    def taps(self) -> tuple[int, ...]:
        return self.plan.taps

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_model(self) -> None:
        """Called before the first step, and with a device mesh where layers are to be sharded over it."""
        if self.device_mesh is not None:
            shard(self.network, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimization.optimizer(self.trained)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        step = self.global_step
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = self.optimization.lr_at(step)
        logging = (step + 1) % self.log_every == 0
        found = self.weight_gradients(batch, step)
        sums = self.accumulate(batch, step, logging)
        norm = clip(self.trained, self.optimization.clip)
        optimizer.step()
        optimizer.zero_grad()
        self.clock.count(batch["tokens"].numel() * self.trainer.world_size)
        if logging:
            found |= means("train", self.summed(sums)) | self.at_taps.lap(self.summed) | self.clock.lap()
            found |= {"train/lr": self.optimization.lr_at(step), "train/gradient_norm": norm.item()}
        self.record(found, step + 1)

    def accumulate(self, batch: Batch, step: int, logging: bool = False) -> Sums:
        """Leave the gradient of the whole batch, over all processes, in the weights; what was measured, if
        asked.

        The data-parallel wrapper adds nothing up by itself: it expects one backward pass, here are many.
        """
        keep, scales, sums = self.kept_layers(batch, step), self.scales(batch), Sums()
        self.at_taps.begin_step()
        for rows in self.micro_batches(batch):
            part = {key: value[rows] for key, value in batch.items()}
            self.plan.backward(
                part, step, scales, keep=None if keep is None else keep[:, rows],
                sums=sums if logging else None, watch=self.watch(compare=logging),
            )  # fmt: skip
        if self.trainer.world_size > 1:
            whole = sum_pieces(self.trained, self.trainer.world_size)
            add_up(whole, lambda values: self.trainer.strategy.reduce(values, reduce_op="sum"))
        return sums

    def watch(self, compare: bool) -> Watch:
        """Takes down every family's gradient at the taps, and its product with the next token's."""
        next_token: States = {}

        def note(name: str, found: States, states: States) -> None:
            self.at_taps.note(name, found)
            if compare and name == "trunk":
                next_token.update(at_lower_taps(states, self.plan.trunk.num_layers, found, self.taps))
            elif compare:
                self.at_taps.compare(name, found, next_token)

        return note

    def weight_gradients(self, batch: Batch, step: int) -> dict[str, float]:
        """Every family's gradient in the trunk's weights, on the first micro-batch, where it is due."""
        every = self.plan.objective.gradient_every
        if every is None or self.frozen or (step + 1) % every:
            return {}
        rows, keep = self.micro_batches(batch)[0], self.kept_layers(batch, step)
        part, scales = {key: value[rows] for key, value in batch.items()}, self.scales(batch)

        def run(name: str) -> None:
            self.plan.backward(part, step, scales, keep=None if keep is None else keep[:, rows], only=name)

        return in_weights(run, ["trunk", *self.plan.losses], self.plan.trunk, self.trained)

    def kept_layers(self, batch: Batch, step: int) -> Tensor | None:
        """Which rows of this process run which layer, [L, B]."""
        if self.frozen:  # nothing would be learned from it
            return None
        layers, most = self.plan.trunk.num_layers, self.optimization.max_steps
        rates = self.plan.objective.dropout(layers, step=step, max_steps=most)
        place = (self.trainer.global_rank, self.trainer.world_size)
        return kept_layers(rates, len(batch["tokens"]), seed=self.seed, step=step, place=place)

    def micro_batches(self, batch: Batch) -> list[slice]:
        rows = len(batch["tokens"])
        size = self.optimization.micro_rows or rows
        return [slice(first, first + size) for first in range(0, rows, size)]

    def scales(self, batch: Batch) -> dict[int, Tensor]:
        """depth -> 1 / its targets in the whole batch, over all processes (whose gradients are added)."""
        counts = self.plan.counts(batch)
        if self.trainer.world_size > 1:
            counts = self.trainer.strategy.reduce(counts, reduce_op="sum")
        return dict(zip(self.plan.depths, 1 / counts.clamp(min=1), strict=True))

    def on_validation_epoch_start(self) -> None:
        self.totals = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for rows in self.micro_batches(batch):
            part = {key: value[rows] for key, value in batch.items()}
            add(self.totals, self.plan.measure(part, self.global_step))

    def on_validation_epoch_end(self) -> None:
        if self.totals:
            self.record(means("val", self.summed(self.totals)), self.global_step)
        self.validated = self.global_step
        self.clock.restart()

    def summed(self, sums: dict[str, Tensor]) -> dict[str, list[float]]:
        """Sums over all processes, as numbers; one wait for the device."""
        stacked = torch.stack(list(sums.values()))
        if self.trainer.world_size > 1:
            stacked = self.trainer.strategy.reduce(stacked, reduce_op="sum")
        return dict(zip(sums, stacked.tolist(), strict=True))

    def record(self, values: dict[str, float], step: int) -> None:
        self.latest |= values
        for report in self.reports if self.trainer.is_global_zero else ():
            report(step, values)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tap_gradients"] = self.at_taps.squares(self.summed)
        checkpoint["state_dict"] = self.kept(checkpoint["state_dict"])

    def kept(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds of a state dict: not the trunk where it is frozen."""
        frozen = "network.trunk." if self.frozen else None
        return {name: state[name] for name in state if frozen is None or not name.startswith(frozen)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at_taps.go_on(checkpoint.get("tap_gradients", {}), self.trainer.world_size)

    def on_train_start(self) -> None:
        self.plan.check_targets(self.trainer.train_dataloader)
        self.clock.restart()

    def train(self, mode: bool = True) -> "Training":
        """A frozen trunk stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.network.trunk.eval()
        return self
