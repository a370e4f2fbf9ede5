"""What happens beside training: checkpoints, the expected τ now and then, and which network is kept."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from training.progress import tell

SELECT = ("last", "loss", "tau")
Measure = Callable[[], dict[str, float]]


class Checkpoints(Callback):
    """Writes last.ckpt every so many steps, at the end, and after Ctrl-C.

    Ctrl-C ends the run after the step under way. The file is renamed into place, so it is always whole.
    Validation that is due at that step is still done: a resumed run begins behind it.
    """

    def __init__(self, path: Path, every: int, validate_every: int):
        self.path, self.every, self.validate_every = path, every, validate_every
        self.interrupted = False

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.before = signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        tell("stopping after this step (Ctrl-C again: at once)")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        last = trainer.global_step >= trainer.max_steps
        if trainer.world_size > 1:  # a process that learns of it a step later would wait for the others
            self.interrupted = trainer.strategy.reduce_boolean_decision(self.interrupted, all=False)
        if self.interrupted or last or trainer.global_step % self.every == 0:
            save_whole(trainer, self.path)
        if self.interrupted:
            trainer.should_stop = True
            if trainer.global_step % self.validate_every:  # Lightning validates whenever it stops
                trainer.limit_val_batches = 0

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        signal.signal(signal.SIGINT, self.before)


class Watch(Callback):
    """Measures the expected τ every so many steps and at the end, beside the other validation numbers.

    Every process measures, for where weights are sharded all must take part.
    """

    def __init__(self, measure: Measure, every: int, best: "Best | None" = None):
        self.measure, self.every, self.best = measure, every, best

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % self.every == 0 or step >= trainer.max_steps:
            pl_module.eval()
            pl_module.record(self.measure(), step)
            pl_module.train()
            pl_module.clock.restart()
            if self.best is not None and self.best.by == "tau":
                self.best.consider(trainer, pl_module)


class Best(Callback):
    """Keeps the checkpoint of the step at which the run was best, by validation loss or by expected τ.

    The score is the mean over what is trained: all losses, or every τ. best.ckpt carries it, so that a
    resumed run goes on comparing.
    """

    def __init__(self, path: Path, by: str):
        self.path, self.by = path, by
        self.score, self.step = -float("inf"), 0
        self.values: dict[str, float] = {}

    def recall(self, first_step: int) -> None:
        """What the run had found up to the step from which it goes on; what came later comes again."""
        known = self.stored()["callbacks"][self.state_key] if self.path.is_file() else None
        if known and 0 < known["step"] <= first_step:
            self.score, self.step, self.values = known["score"], known["step"], known["values"]
        else:
            self.path.unlink(missing_ok=True)

    def restore(self, network: nn.Module) -> dict[str, float]:
        """Give the network the best weights, all that were trained; what was measured of them."""
        state = self.stored()["state_dict"]
        network.load_state_dict(
            {name.removeprefix("network."): value for name, value in state.items()}, strict=False
        )
        tell(f"the best network, by {self.by}, is that of step {self.step}")
        return self.values

    def stored(self) -> dict[str, Any]:
        return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.by == "loss" and not trainer.sanity_checking:
            self.consider(trainer, pl_module)

    def consider(self, trainer: Trainer, pl_module: Any) -> None:
        found = score(pl_module.latest, self.by)
        if found is not None and found > self.score:
            self.score, self.step = found, trainer.global_step
            self.values = dict(pl_module.latest)
            save_whole(trainer, self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "step": self.step, "values": self.values}


def score(latest: dict[str, float], by: str) -> float | None:
    """The larger, the better; None where nothing of the kind was measured.

    >>> score({"val/trunk/loss": 3.0, "val/sequential/depth1/loss": 5.0, "val/trunk/targets": 9.0}, "loss")
    -4.0
    """
    if by == "tau":
        values = [value for name, value in latest.items() if name.startswith("val/tau_")]
    else:
        losses = (name for name in latest if name.startswith("val/") and name.endswith("/loss"))
        values = [-latest[name] for name in losses]
    return sum(values) / len(values) if values else None


def save_whole(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint beside its place and rename it, so that a kill leaves the one before."""
    part = path.with_suffix(".part")
    trainer.save_checkpoint(part)
    if trainer.is_global_zero:
        os.replace(part, path)
