"""What a run takes before its steps: reading the prompt, and what a drafter has to catch up with."""

from collections.abc import Callable
from statistics import median

from decoding.contest import Build
from decoding.generate import generate
from decoding.timed import Timed
from mtp import Network

CALLS = 3


def prompt_seconds(network: Network, ids: list[int], step: float) -> float:
    """Seconds of plain decoding before its first step; a step takes `step`."""
    return rest(lambda: generate(network, ids, max_new_tokens=1, eos_token_ids=())[0].seconds, step)


def catching_up(network: Network, ids: list[int], build: Build, length: int, draft: float) -> float:
    """Seconds inside a drafter up to the end of its first draft beyond what drafting `length` tokens takes,
    which is `draft`."""

    def call() -> float:
        timed = Timed(build())
        generate(
            network, ids, drafter=timed, num_draft_tokens=length, max_new_tokens=length + 2, eos_token_ids=()
        )
        return timed.marks[0] + timed.steps()[0]

    return rest(call, draft)


def rest(call: Callable[[], float], known: float) -> float:
    """
    >>> rest(lambda: 5.0, 2.0), rest(lambda: 1.0, 2.0)
    (3.0, 0.0)
    """
    return max(0.0, median(call() for _ in range(CALLS)) - known)


def with_beginning(plain: float, prompt: float, own: float, speedup: float) -> float:
    """Seconds of a run that plain decoding does in `plain`, of which `prompt` go before its steps, where
    steps are `speedup` times as fast and a drafter needs `own` more to begin.

    >>> with_beginning(10.0, 2.0, 1.0, 4.0)
    5.0
    """
    return prompt + own + (plain - prompt) / speedup
