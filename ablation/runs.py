"""Training runs of an ablation: each is known by its config, made once, and goes on where it was stopped."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decoding.results import identity, replace
from mtp import UserError
from training.progress import say

PLACES = ("out", "run_dir", "name", "resume")  # the keys of a training config that no number depends on
PEAK, MARK = "peak_memory.json", "config.id"  # in the run folder
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: its whole config, and the run that makes its frozen trunk, if one does."""

    config: dict[str, Any]
    trunk: "Run | None" = None

    @property
    def folder(self) -> Path:
        return Path(self.config["run_dir"])

    @property
    def model(self) -> str:
        """The folder that its trunk is loaded from."""
        return self.config["trunk"]["path"] if self.heads else self.config["out"]

    @property
    def heads(self) -> str | None:
        """The folder that its heads are loaded from, where it saves nothing else."""
        return self.config["out"] if self.config["save"] == "heads" else None

    @property
    def trunk_config(self) -> dict[str, Any]:
        """What its trunk is made from."""
        return self.trunk.trunk_config if self.trunk else self.config["trunk"]

    @property
    def content(self) -> dict[str, Any]:
        """All that its numbers depend on, wherever it lies."""
        found = without_places(self.config)
        return found | {"trunk": self.trunk.content} if self.trunk else found


def without_places(training: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in training.items() if key not in PLACES}


def ensure_trained(run: Run, train: Callable[[dict[str, Any]], None]) -> None:
    """Train what is not there; a run of the same config that was stopped goes on."""
    if run.trunk is not None:
        ensure_trained(run.trunk, train)
    if is_trained(run):
        return
    checkpoint, mark = run.folder / "checkpoints" / "last.ckpt", run.folder / MARK
    key = identity(without_places(run.config))
    resume = checkpoint.is_file() and mark.is_file() and mark.read_text() == key
    if not resume:
        checkpoint.unlink(missing_ok=True)  # else a stop before the first new one would lead back to it
    replace(mark, key)
    reset_peak()
    try:
        train(run.config | {"resume": resume})
    except SystemExit:
        say("an ablation goes on by itself: the same command is enough")
        raise
    replace(run.folder / PEAK, json.dumps(peak()))
    checkpoint.unlink(missing_ok=True)  # the network is saved: its optimizer is of no more use


def is_trained(run: Run) -> bool:
    return same(read_provenance(run.config["out"]).get("config"), run.config)


def same(found: Any, training: dict[str, Any]) -> bool:
    return isinstance(found, dict) and identity(without_places(found)) == identity(without_places(training))


def read_provenance(folder: str) -> dict[str, Any]:
    """What a folder says of its making, or the first head in it; nothing where neither says anything."""
    for path in (Path(folder, "provenance.json"), *sorted(Path(folder).glob("heads/*/provenance.json"))):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return {}


def reset_peak() -> None:
    """Forget the most memory held so far, so that every run's own can be told."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        RESET.write_text("5")
    except OSError:
        return


def peak() -> int | None:
    """Bytes: the most that the GPU has allocated, else the most that the process has held since the reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def read_peak(run: Run) -> int | None:
    try:
        return json.loads((run.folder / PEAK).read_text())
    except (OSError, ValueError):
        return None


def check_held_out(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """UserError unless a run holds out what the prompts are cut from, near-duplicates of it included.

    Both come from one rule (training.split): a cluster of near-duplicates goes to one split as a whole.
    """
    if held_out(found) != held_out(wanted):
        raise UserError(f"{where}: data.{', data.'.join(HELD_OUT)} are not those that prompts are cut by")
    if not wanted["held_out_fraction"]:
        raise UserError("data.held_out_fraction=0 leaves nothing that no run has seen")


HELD_OUT = ("source", "validation_fraction", "held_out_fraction")  # keys of `data` that say what is held out


def held_out(data: dict[str, Any]) -> dict[str, Any]:
    return {key: data.get(key) for key in HELD_OUT}
