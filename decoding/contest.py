"""Several ways to decode one prompt, timed in turn: our drafters, plain decoding, and other packages."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from decoding.costs import OF_DRAFTERS, Known
from decoding.draft import Drafter
from decoding.drafters.draft_model import load
from decoding.experience import Experience
from decoding.generate import build_drafter, generate
from decoding.rows import Completion
from decoding.timed import Timed
from mtp import Network

WARM_UP_TOKENS = 16
Build = Callable[[], Drafter]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded once."""

    token_ids: list[int]
    seconds: float
    completion: Completion | None = None  # what another package does not tell
    draft_seconds: float | None = None  # of `seconds`, inside the drafter; None without a stopwatch


class Contender(Protocol):
    """Continues a prompt greedily."""

    name: str

    def __call__(self, prompt: list[int], max_new_tokens: int) -> Run: ...


class Ours:
    """One of our drafters, built anew for every run: one that remembers earlier outputs would know this one.

    What automatic length has measured is of the machine, not of the text, and is kept from run to run. What
    it has learned of acceptance is kept from prompt to prompt, but not from one run of a prompt to the next.
    stopwatch: take the drafter's own time, for which a GPU has to wait. options are generate's.
    """

    def __init__(self, name: str, network: Network, build: Build, *, stopwatch: bool = False, **options: Any):
        self.name, self.network, self.build = name, network, build
        self.stopwatch, self.options = stopwatch, options
        self.known, self.before, self.prompt = Known(), Experience(), list[int]()

    def __call__(self, prompt: list[int], max_new_tokens: int) -> Run:
        drafter = Timed(self.build()) if self.stopwatch else self.build()
        if prompt != self.prompt:
            self.prompt, self.before = prompt, copy.deepcopy(self.known.experience)
        self.known.experience = copy.deepcopy(self.before)
        OF_DRAFTERS[drafter] = self.known
        began = time.perf_counter()
        done = generate(
            self.network, prompt, drafter=drafter, **self.options | {"max_new_tokens": max_new_tokens}
        )[0]
        taken = time.perf_counter() - began  # as other packages' times are taken, from outside
        inside = drafter.seconds if isinstance(drafter, Timed) else None
        return Run(done.token_ids, taken, done, inside)


def maker(network: Network, name: str, options: dict[str, Any]) -> Build:
    """What builds a drafter of this name with these options again and again. A draft model is loaded once."""
    if name == "draft_model" and isinstance(options.get("model"), str):
        options = options | {"model": load(network, options["model"])}
    return lambda: build_drafter(network, name, **options)


def race(
    contenders: Sequence[Contender], prompt: list[int], max_new_tokens: int, repeats: int
) -> dict[str, list[Run]]:
    """Every contender's runs on one prompt, in turn; by name, in the contenders' order."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for contender in turns(contenders, repeats):
        runs[contender.name].append(contender(prompt, max_new_tokens))
    return runs


def turns(contenders: Sequence[Any], repeats: int) -> Iterator[Any]:
    """Who goes first changes, so that a machine that slows down or speeds up favours nobody.

    >>> "".join(turns("abc", 3))
    'abcbcacab'
    """
    for repeat in range(repeats):
        first = repeat % len(contenders)
        yield from (*contenders[first:], *contenders[:first])


def warm_up(contenders: Sequence[Contender], prompt: list[int]) -> None:
    """A short run of each, which is not counted."""
    for contender in contenders:
        contender(prompt, WARM_UP_TOKENS)


def same(runs: Sequence[Run], plain: Sequence[Run]) -> bool:
    """Whether every run, plain decoding's own among them, gave the same tokens."""
    return all(run.token_ids == plain[0].token_ids for run in (*runs, *plain))


def seconds(runs: Sequence[Run]) -> float:
    """The median of a prompt's times."""
    return median(run.seconds for run in runs)
