"""Completions as plain data: the JSON that decode.py writes, and the one line that sums them up."""

from typing import Any

from decoding.acceptance import Acceptance, total
from decoding.rows import Completion


def result(completion: Completion) -> dict[str, Any]:
    """One entry of `results`."""
    acceptance = completion.acceptance
    return {
        "prompt": completion.prompt,
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "steps": acceptance.steps,
        "tau": acceptance.tau,
        "alpha": acceptance.alpha,
        "drafted": acceptance.drafted,
        "tested": acceptance.tested,
        "accepted": acceptance.accepted,
        "tested_at_depth": acceptance.tested_at_depth,
        "accepted_at_depth": acceptance.accepted_at_depth,
        "logprobs": completion.logprobs,
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
    }


def document(
    completions: list[Completion], plain: list[Completion] | None, same: bool, **settings: Any
) -> dict[str, Any]:
    """The whole JSON document. `same`: greedy or coupled, so `identical` can be said; a sampled text may
    differ."""
    return {
        "schema": 1,
        **settings,
        "results": [result(completion) for completion in completions],
        "plain": None if plain is None else [result(completion) for completion in plain],
        "identical": identical(completions, plain) if plain is not None and same else None,
        "speedup": None if plain is None else speedup(completions, plain),
    }


def identical(completions: list[Completion], plain: list[Completion]) -> bool:
    return all(a.token_ids == b.token_ids for a, b in zip(completions, plain, strict=True))


def rate(completions: list[Completion]) -> float:
    """Tokens per second over all completions, each with its own time."""
    seconds = sum(completion.seconds for completion in completions)
    return sum(len(completion.token_ids) for completion in completions) / seconds if seconds else 0.0


def speedup(completions: list[Completion], plain: list[Completion]) -> float | None:
    base = rate(plain)
    return rate(completions) / base if base else None


def summary(completions: list[Completion]) -> str:
    """τ, α and speed in one line; n/a where nothing was drafted or emitted."""
    acceptance: Acceptance = total([completion.acceptance for completion in completions])
    return (
        f"{acceptance.emitted} tokens in {acceptance.steps} steps, "
        f"τ {number(acceptance.tau)}, α {number(acceptance.alpha)}, {rate(completions):.1f} tokens/s"
    )


def number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def repeated_4grams(token_ids: list[int]) -> float:
    """Share of 4-grams that stood in the same output before: near 1 where a greedy text loops.

    >>> repeated_4grams([1, 2, 3, 4, 1, 2, 3, 4])
    0.2
    """
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
