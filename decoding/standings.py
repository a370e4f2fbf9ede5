"""From timed runs to what they say: speed by category and contender, with intervals over prompts.

A row is one prompt: its category, what plain decoding made of it, and by contender the tokens, the seconds of
every run and, of our own, what was accepted. All is plain data.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from decoding.acceptance import Acceptance, total
from decoding.comparison import counts
from decoding.contest import Run, same

Row = dict[str, Any]
OVERALL = "overall"
UNPREDICTABLE = "unpredictable"  # chosen to defeat lookup, so it is no part of the whole
PLAIN, TRANSFORMERS = "plain", "transformers"
RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percent


def result(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """One contender on one prompt."""
    found: dict[str, Any] = {
        "tokens": len(runs[0].token_ids),
        "seconds": [run.seconds for run in runs],
        "identical": same(runs, plain),
    }
    ours = [run.completion for run in runs if run.completion is not None]
    return found | counts(ours) if ours else found  # of all runs: with automatic length they differ


def standings(rows: Sequence[Row], contenders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By category and by contender, the whole first."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    groups = {OVERALL: [row for row in rows if row["category"] != UNPREDICTABLE] or list(rows)}
    groups |= {category: [row for row in rows if row["category"] == category] for category in categories}
    return {
        group: {name: standing(found, name, contenders) for name in contenders}
        for group, found in groups.items()
    }


def standing(rows: Sequence[Row], name: str, contenders: Sequence[str]) -> dict[str, Any]:
    """One contender on some prompts: tokens a second, and its ratio to plain decoding's, ours and theirs."""
    results = [row["contenders"][name] for row in rows]
    tokens, seconds = speeds(rows, name)
    found: dict[str, Any] = {
        "tokens_per_second": float(tokens.sum() / seconds.sum()),
        "identical": sum(result["identical"] for result in results),
        "prompts": len(results),
        "tau": None,
        "alpha": None,
        "conditional": [],
    }
    for base in (PLAIN, TRANSFORMERS):
        found[f"to_{base}"] = ratio(rows, name, base) if base in contenders else None
    if all("steps" in result for result in results):
        together = total([counted(result) for result in results])
        found |= {"tau": together.tau, "alpha": together.alpha, "conditional": together.conditional}
    return found


def counted(result: dict[str, Any]) -> Acceptance:
    keys = ("steps", "emitted", "drafted", "tested_at_depth", "accepted_at_depth")
    return Acceptance(**{key: result[key] for key in keys})


def speeds(rows: Sequence[Row], name: str) -> tuple[Any, Any]:
    """Tokens and median seconds by prompt, as arrays."""
    results = [row["contenders"][name] for row in rows]
    tokens = np.array([result["tokens"] for result in results], dtype=float)
    return tokens, np.array([median(result["seconds"]) for result in results])


def ratio(rows: Sequence[Row], name: str, base: str) -> dict[str, Any]:
    """Tokens a second of one by those of the other over all these prompts, and a 95 % interval.

    The interval is from prompts drawn anew, with replacement and the same for both (a paired bootstrap): it
    says how far another choice of such prompts might lead, not how far the machine's times vary.
    """
    tokens, seconds = speeds(rows, name)
    base_tokens, base_seconds = speeds(rows, base)
    drawn = np.random.default_rng(0).integers(len(rows), size=(RESAMPLES, len(rows)))
    every = np.concatenate([np.arange(len(rows))[None], drawn])
    values = (tokens[every].sum(1) / seconds[every].sum(1)) / (
        base_tokens[every].sum(1) / base_seconds[every].sum(1)
    )
    low, high = np.percentile(values[1:], INTERVAL)
    return {"value": float(values[0]), "low": float(low), "high": float(high)}
