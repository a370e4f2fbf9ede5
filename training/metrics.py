"""Where a run's numbers go: a file for later, the terminal for now. Both are called with (step, values)."""

import csv
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN = {
    "train/trunk/loss": "loss {:.3f}",
    "val/trunk/loss": "validation {:.3f}",
    "train/tokens_per_second": "{:,.0f} tokens/s",
}
COLUMNS = ["step", "metric", "value"]


class MetricsFile:
    """A CSV file with one line for each number (step, metric, value), complete after every step.

    A run that begins at `first_step` > 0 goes on with the lines up to that step: what a broken run wrote
    beyond its last checkpoint is dropped, because it comes again.
    """

    def __init__(self, path: Path, first_step: int = 0):
        self.path = path
        kept = [row for row in read_rows(path) if int(row[0]) <= first_step] if first_step else []
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *kept])

    def __call__(self, step: int, values: dict[str, float]) -> None:
        if values:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([step, name, value] for name, value in values.items())


def read_rows(path: Path) -> list[list[str]]:
    """The lines of a metrics file without its header; one that was cut off in the middle is left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.reader(file) if len(row) == len(COLUMNS) and row != COLUMNS]


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


class Terminal:
    """A progress bar with loss and tokens/s on a terminal, a line for each log step elsewhere."""

    def __init__(self, max_steps: int, first_step: int = 0):
        self.max_steps = max_steps
        self.shown: dict[str, str] = {}  # what was told last, by where it comes from
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task("training", total=max_steps, completed=first_step, text="")

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.shown |= {name: SHOWN[name].format(value) for name, value in values.items() if name in SHOWN}
        text = "  ".join(self.shown[name] for name in SHOWN if name in self.shown)
        self.bar.update(self.task, completed=step, text=text)
        if values and self.bar.disable:
            print(f"step {step}/{self.max_steps}  {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Terminal":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
