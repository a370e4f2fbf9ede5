"""A drafter against plain decoding of the same trunk: the same prompts, one by one and in turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decoding.acceptance import total
from decoding.contest import Build, Contender, Ours, Run, race, same, seconds, warm_up
from decoding.draft import Autoregressive
from decoding.report import repeated_4grams
from decoding.rows import Completion
from mtp import Network


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
    network: Network,
    build: Build,
    prompts: Iterable[list[int]],
    *,
    repeats: int,
    max_new_tokens: int,
    **options: Any,
) -> list[Trial]:
    """Decode every prompt `repeats` times plainly and with what `build` builds for each run.

    options are generate's.
    """
    contenders: list[Contender] = [
        Ours("plain", network, Autoregressive, **options),
        Ours("drafted", network, build, stopwatch=True, **options),
    ]
    trials: list[Trial] = []
    for prompt in prompts:
        if not trials:
            warm_up(contenders, prompt)
        runs = race(contenders, prompt, max_new_tokens, repeats)
        trials.append(trial(runs["drafted"], runs["plain"]))
    return trials


def trial(drafted: list[Run], plain: list[Run]) -> Trial:
    first, first_plain = drafted[0].completion, plain[0].completion
    assert first is not None
    assert first_plain is not None
    return Trial(
        drafted=first,
        plain=first_plain,
        identical=same(drafted, plain),
        seconds=seconds(drafted),
        plain_seconds=seconds(plain),
        draft_seconds=median(run.draft_seconds or 0.0 for run in drafted),
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
