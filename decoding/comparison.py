"""A drafter against plain decoding of the same trunk: the same prompts, one by one and in turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decoding.acceptance import total
from decoding.draft import Autoregressive, Drafter
from decoding.generate import Completion, generate
from decoding.report import repeated_4grams
from decoding.timed import Timed
from mtp import Network

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt decoded greedily, several times each way; times are medians in seconds."""

    drafted: Completion
    plain: Completion
    identical: bool  # every time
    seconds: float
    plain_seconds: float
    draft_seconds: float  # of `seconds`, inside the drafter


def compare(
    network: Network, drafter: Drafter, prompts: Iterable[list[int]], *, repeats: int, **options: Any
) -> list[Trial]:
    """Decode every prompt `repeats` times plainly and with the drafter; options are generate's."""
    timed = Timed(drafter)
    trials: list[Trial] = []
    for prompt in prompts:
        if not trials:
            for warm in (timed, Autoregressive()):
                generate(network, prompt, drafter=warm, **options | {"max_new_tokens": WARM_UP_TOKENS})
        trials.append(trial(network, timed, prompt, repeats=repeats, **options))
    return trials


def trial(network: Network, timed: Timed, prompt: list[int], *, repeats: int, **options: Any) -> Trial:
    drafted: list[Completion] = []
    plain: list[Completion] = []
    inside: list[float] = []
    for repeat in range(repeats):
        # Who goes first changes, so that a machine that slows down or speeds up favours nobody.
        for turn in (repeat, repeat + 1):
            if turn % 2:
                drafted += generate(network, prompt, drafter=timed, **options)
                inside.append(timed.seconds)
            else:
                plain += generate(network, prompt, drafter=Autoregressive(), **options)
    return Trial(
        drafted=drafted[0],
        plain=plain[0],
        identical=all(completion.token_ids == plain[0].token_ids for completion in drafted + plain),
        seconds=median(completion.seconds for completion in drafted),
        plain_seconds=median(completion.seconds for completion in plain),
        draft_seconds=median(inside),
    )


def greedy(trials: Sequence[Trial]) -> dict[str, Any]:
    """All about greedy decoding as plain data; `prompts` has what an interval over prompts needs."""
    drafted = [trial.drafted for trial in trials]
    shares = [repeated_4grams(completion.token_ids) for completion in drafted]
    return {
        **counts(drafted),
        **speeds(trials),
        "identical": all(trial.identical for trial in trials),
        "repeated_4grams": sum(shares) / len(shares),
        "prompts": [
            {
                "tokens": len(trial.drafted.token_ids),
                "steps": trial.drafted.acceptance.steps,
                "seconds": trial.seconds,
                "plain_seconds": trial.plain_seconds,
            }
            for trial in trials
        ],
    }


def counts(completions: Sequence[Completion]) -> dict[str, Any]:
    """What was drafted, tested and accepted in all, as plain data; None where nothing was."""
    acceptance = total([completion.acceptance for completion in completions])
    return {
        "tau": acceptance.tau,
        "alpha": acceptance.alpha,
        "conditional": acceptance.conditional,
        "emitted": acceptance.emitted,
        "steps": acceptance.steps,
        "drafted": acceptance.drafted,
        "tested_at_depth": acceptance.tested_at_depth,
        "accepted_at_depth": acceptance.accepted_at_depth,
    }


def speeds(trials: Sequence[Trial]) -> dict[str, Any]:
    """Speed of both ways over all prompts, and the draft cost c: drafter time by target time for one token.

    Of an early exit's c a part comes back: what it computes, the verification need not.
    """
    rate = tokens([trial.drafted for trial in trials]) / sum(trial.seconds for trial in trials)
    plain_rate = tokens([trial.plain for trial in trials]) / sum(trial.plain_seconds for trial in trials)
    nodes = sum(trial.drafted.acceptance.drafted for trial in trials)
    inside = sum(trial.draft_seconds for trial in trials)
    return {
        "tokens_per_second": rate,
        "plain_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate,
        "draft_cost": inside / nodes * plain_rate if nodes else None,
    }


def tokens(completions: Sequence[Completion]) -> int:
    return sum(len(completion.token_ids) for completion in completions)
