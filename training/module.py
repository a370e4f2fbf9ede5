"""One LightningModule for every mix of heads, on a trunk that is trained along or frozen.

Shapes: B rows, T tokens, H hidden size, L layers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from mtp import Network, UserError
from mtp.readout import Readout
from training.losses import (
    HeadLoss,
    Objective,
    Targets,
    agreement,
    cross_entropy,
    feature_distance,
    targets_at_depth,
)
from training.schedule import kept_layers, learning_rate_factor

Report = Callable[[int, dict[str, float]], None]  # after every step; with numbers where there are some
Batch = dict[
    str, Tensor
]  # tokens [B, T], documents [B, T], and mask [B, T] where not every token is a target


@dataclass(frozen=True, slots=True)
class Optimization:
    """AdamW on a warmup and a cosine. A batch is one step, run `micro_rows` rows at a time (None: all)."""

    lr: float
    warmup_steps: int
    lr_floor: float  # of lr
    max_steps: int
    weight_decay: float  # on matrices only
    betas: tuple[float, float]
    clip: float
    micro_rows: int | None

    def __post_init__(self) -> None:
        check("max_steps", self.max_steps, 1, whole=True)
        check("warmup_steps", self.warmup_steps, 0, whole=True)
        for key in ("lr", "lr_floor", "weight_decay", "clip"):
            check(key, getattr(self, key), 0)
        if self.micro_rows is not None:
            check("micro_rows", self.micro_rows, 1, whole=True)


@dataclass(frozen=True, slots=True)
class Term:
    """One readout, what its loss weighs, and whether its gradient stops before the trunk."""

    name: str  # "trunk", "sequential/depth1", "early_exit/layer4"
    readout: Readout
    weight: float
    detached: bool
    feature: float = 0.0  # weight of the distance to the state that the readout foretells


class Training(LightningModule):
    """Trains the heads named in `losses`, and the trunk unless it is frozen; other heads stay as they are.

    A head whose loss is None has no weights of its own: its readouts are exits of the trunk, which the
    objective weighs (LayerSkip's J, in place of the trunk's plain loss). Optimization is manual, because the
    mean over a batch needs the number of all its targets before its first micro-batch is differentiated.
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
        self.network, self.losses, self.objective, self.optimization = (
            network,
            losses,
            objective,
            optimization,
        )
        self.frozen, self.seed, self.log_every, self.reports = frozen, seed, log_every, reports
        network.train().requires_grad_(False)
        network.trunk.requires_grad_(not frozen)
        for name in losses:
            network.heads[name].requires_grad_(True)
        check_trainable(network, losses, objective, frozen)
        self.totals: dict[str, Tensor] = {}
        self.clock = Clock()
        self.latest: dict[str, float] = {}  # what was logged last
        self.validated = -1  # the step at which it was validated last
        if frozen:  # a checkpoint holds what is trained; the trunk is where it was loaded from
            self.strict_loading = False

    @property
    def trunk(self) -> Any:
        return self.network.trunk

    def head(self, name: str) -> Any:
        return self.network.heads[name]

    @property
    def taps(self) -> tuple[int, ...]:
        wanted = {tap for name in self.losses for tap in self.head(name).taps}
        return tuple(sorted(wanted | {self.trunk.num_layers}))

    @property
    def exits(self) -> bool:
        """Whether the trunk is trained with the exit loss."""
        return any(loss is None and name not in self.objective.detach for name, loss in self.losses.items())

    def layer_weights(self, step: int) -> list[float]:
        """Weight of the next-token loss at each layer, the last being the trunk's own."""
        if self.exits:
            return self.objective.layer_weights(
                self.trunk.num_layers, step=step, max_steps=self.optimization.max_steps
            )
        return [0.0] * (self.trunk.num_layers - 1) + [1.0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim >= 2]
        vectors = [parameter for parameter in trained if parameter.ndim < 2]
        setting = self.optimization
        groups = [
            {"params": matrices, "weight_decay": setting.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = all(parameter.is_cuda for parameter in trained)
        return torch.optim.AdamW(
            groups, lr=setting.lr, betas=(setting.betas[0], setting.betas[1]), fused=fused
        )

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        step, setting = self.global_step, self.optimization
        optimizer: Any = self.optimizers()
        lr = setting.lr * learning_rate_factor(
            step, warmup_steps=setting.warmup_steps, max_steps=setting.max_steps, floor=setting.lr_floor
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        keep = kept_layers(self.dropout_rates(step), len(batch["tokens"]), seed=self.seed, step=step)
        logging = (step + 1) % self.log_every == 0
        scales, sums = self.scales(batch), dict[str, Tensor]()
        for rows in self.micro_batches(batch):
            part = {key: value[rows] for key, value in batch.items()}
            terms = list(self.terms(part["tokens"], step, None if keep is None else keep[:, rows]))
            targets = targets_by_depth(part, {term.readout.depth for term in terms})
            self.manual_backward(self.loss(terms, targets, scales))
            if logging:
                add(sums, self.measure(terms, targets))
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        self.clock.count(batch["tokens"].numel() * self.trainer.world_size)
        found: dict[str, float] = {}
        if logging:
            found = means("train", self.summed(sums)) | {"train/lr": lr, "train/gradient_norm": norm.item()}
            found |= self.clock.lap()
        self.record(found, step + 1)

    def dropout_rates(self, step: int) -> list[float]:
        if self.frozen:  # nothing would be learned from it
            return [0.0]
        return self.objective.dropout(self.trunk.num_layers, step=step, max_steps=self.optimization.max_steps)

    def micro_batches(self, batch: Batch) -> list[slice]:
        rows = len(batch["tokens"])
        size = self.optimization.micro_rows or rows
        return [slice(first, first + size) for first in range(0, rows, size)]

    def scales(self, batch: Batch) -> dict[int, Tensor]:
        """depth -> 1 / its targets in the whole batch, over all processes (whose gradients are averaged)."""
        depths = range(1 + max((getattr(self.head(name), "depth", 0) for name in self.losses), default=0))
        counts = torch.stack([targets.count for targets in targets_by_depth(batch, set(depths)).values()])
        world = self.trainer.world_size
        counts = self.trainer.strategy.reduce(counts, reduce_op="sum") if world > 1 else counts
        return dict(zip(depths, world / counts.clamp(min=1), strict=True))

    def terms(self, tokens: Tensor, step: int, keep: Tensor | None = None) -> Iterator[Term]:
        """Every readout of tokens [B, T], the trunk's first; the heads read the dropped-out states."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            states = self.trunk(tokens, taps=self.taps, keep=keep, logits=False).states
        *of_layers, of_trunk = self.layer_weights(step)
        last = Readout("trunk", 0, states[self.trunk.num_layers])
        yield Term("trunk", last, 0.0 if self.frozen else of_trunk, False)
        for name, loss in self.losses.items():
            detached = name in self.objective.detach
            with no_gradient_to(self.trunk, detached):
                seen = {tap: state.detach() for tap, state in states.items()} if detached else states
                readouts = self.head(name).readouts(self.trunk, tokens, seen)
            weights = loss.weights(len(readouts)) if loss else [0.0 if self.frozen else w for w in of_layers]
            for readout, weight in zip(readouts, weights, strict=True):
                weight = weight if loss or not detached else 0.0
                feature = loss.feature if loss else 0.0
                yield Term(f"{name}/{readout.name}", readout, weight, detached, feature)

    def loss(self, terms: list[Term], targets: dict[int, Targets], scales: dict[int, Tensor]) -> Tensor:
        """Weighted sum of the mean cross-entropies; a term's logits are gone before the next are made."""
        matrix = self.trunk.model.lm_head.weight
        total = torch.zeros((), device=matrix.device)
        for term in terms:
            readout, target = term.readout, targets[term.readout.depth]
            scale = scales[readout.depth]
            if term.weight:
                of_trunk = matrix.detach() if term.detached else matrix
                weight = of_trunk if readout.matrix is None else readout.matrix
                sums = cross_entropy(readout.hidden, weight, target.labels)
                total = total + term.weight * scale * sums
            if term.feature and readout.feature is not None:
                sums = feature_distance(readout.hidden, readout.feature.detach(), target.valid)
                total = total + term.feature * scale * sums
        return total

    @torch.no_grad()
    def measure(self, terms: list[Term], targets: dict[int, Targets]) -> dict[str, Tensor]:
        """name -> [4]: sums of loss, targets, top-1 agreement and alpha, all in float64."""
        matrix, trunk = self.trunk.model.lm_head.weight, terms[0].readout.hidden
        sums = {}
        for term in terms:
            target, hidden = targets[term.readout.depth], term.readout.hidden
            own = term.readout.matrix
            loss = cross_entropy(hidden, matrix if own is None else own, target.labels)
            agreed = (
                loss.new_zeros(2)
                if term is terms[0]
                else agreement(hidden, trunk, matrix, target, term.readout.depth, own=own)
            )
            sums[term.name] = torch.stack([loss, target.count, *agreed]).double()
        return sums

    def on_validation_epoch_start(self) -> None:
        self.totals = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for rows in self.micro_batches(batch):
            part = {key: value[rows] for key, value in batch.items()}
            terms = list(self.terms(part["tokens"], self.global_step))
            add(
                self.totals,
                self.measure(terms, targets_by_depth(part, {term.readout.depth for term in terms})),
            )

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
        if self.frozen:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name: state[name] for name in state if not name.startswith("network.trunk.")
            }

    def on_train_start(self) -> None:
        self.clock.restart()

    def train(self, mode: bool = True) -> "Training":
        """A frozen trunk stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.network.trunk.eval()
        return self


class Clock:
    """Tokens per second since the last lap, validation left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.started, self.tokens = time.perf_counter(), 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def lap(self) -> dict[str, float]:
        speed = self.tokens / max(time.perf_counter() - self.started, 1e-9)
        self.restart()
        return {"train/tokens_per_second": speed}


def check(key: str, value: Any, least: float, *, whole: bool = False) -> None:
    kind, name = (int, "whole number") if whole else ((int, float), "number")
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
        raise UserError(f"trainer.{key}={value} is not a {name} from {least} on")


def check_trainable(
    network: Network, losses: dict[str, HeadLoss | None], objective: Objective, frozen: bool
) -> None:
    """Refuse a run that would train nothing, or that names heads which are not there."""
    if unknown := sorted(set(objective.detach) - set(losses)):
        raise UserError(
            f"objective.detach names {unknown[0]}, which is not one of the heads trained: {sorted(losses)}"
        )
    of_heads = [name for name in losses if any(True for _ in network.heads[name].parameters())]
    if frozen and not of_heads:
        raise UserError(
            "head: the trunk is frozen and no head with weights is trained, so there is nothing to train"
        )


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


def targets_by_depth(batch: Batch, depths: set[int]) -> dict[int, Targets]:
    mask = batch.get("mask")
    return {
        depth: targets_at_depth(batch["tokens"], batch["documents"], depth, mask) for depth in sorted(depths)
    }


def add(sums: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def means(stage: str, sums: dict[str, list[float]]) -> dict[str, float]:
    """Sums [loss, targets, agreement, alpha] by name -> "train/sequential/depth1/loss" and so on.

    Without targets there is no mean.

    >>> means("val", {"parallel/depth1": [6.0, 4.0, 3.0, 2.0]})["val/parallel/depth1/alpha"]
    0.5
    """
    found: dict[str, float] = {}
    for name, (loss, targets, agreed, alpha) in sums.items():
        found[f"{stage}/{name}/targets"] = targets
        values = {"loss": loss} if name == "trunk" else {"loss": loss, "agreement": agreed, "alpha": alpha}
        found |= {f"{stage}/{name}/{key}": value / targets for key, value in values.items() if targets}
    return found
