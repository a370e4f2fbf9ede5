"""What a run says about itself while it works, on standard error: a bar on a terminal, a line now and then
where the output goes to a file."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

SECONDS = 10.0  # between two lines
Item = TypeVar("Item")
RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")  # as torchrun, SLURM and Lightning number their processes


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Say it once, however many processes there are: the first one does."""
    if first_process():
        say(line)


def first_process() -> bool:
    return next((value for name in RANKS if (value := os.environ.get(name))), "0") == "0"


def shown(work: Sequence[Item], what: str) -> Iterator[Item]:
    """The items one after the other, while it is said how many of them are done."""
    if sys.stderr.isatty():
        yield from track(work, what, console=Console(stderr=True), transient=True)
        return
    told = time.monotonic()
    for done, item in enumerate(work):
        if done and time.monotonic() - told >= SECONDS:
            say(f"{what}: {done} of {len(work)}, {done / len(work):.0%}")
            told = time.monotonic()
        yield item
