"""Decoding with a drafter: that it gives plain decoding's tokens, what it accepts, and how fast it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ablation.drafters import drafter_maker
from ablation.intervals import of_ratio, of_speedup
from ablation.subject import Subject
from decoding.comparison import compare, counts, greedy
from decoding.contest import Build
from decoding.generate import generate
from decoding.replay import Text
from decoding.sampling import Sampling
from decoding.theory import prices, scoring

TIMES = ("tokens_per_second", "plain_tokens_per_second", "speedup", "draft_cost")
SPLIT = "held_out"


@dataclass(frozen=True, slots=True)
class Asked:
    """How rows are decoded."""

    num_draft_tokens: int
    verifier: str
    temperature: float
    seed: int
    repeats: int
    longest: int

    @property
    def options(self) -> dict[str, Any]:
        return {"num_draft_tokens": self.num_draft_tokens, "verifier": self.verifier, "seed": self.seed}


def untimed(subject: Subject, build: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """All prompts at once, greedy and sampled: counts and identity, and null for every time."""
    make = drafter_maker(subject.network, build)
    prompts, most = subject.prompts[SPLIT], subject.new_tokens
    options = asked.options | {"max_new_tokens": most}
    drafted = generate(subject.network, prompts, drafter=make(), **options)
    plain = [text.token_ids[text.prompt :] for text in subject.texts(SPLIT, 0.0)]
    per_prompt = [
        {
            "tokens": len(one.token_ids),
            "steps": one.acceptance.steps,
            "seconds": None,
            "plain_seconds": None,
        }
        for one in drafted
    ]
    found = counts(drafted) | dict.fromkeys(TIMES)
    found |= {"identical": [one.token_ids for one in drafted] == plain, "prompts": per_prompt}
    sampling = Sampling(temperature=asked.temperature)
    sampled = generate(subject.network, prompts, drafter=make(), sampling=sampling, **options)
    return with_intervals({"greedy": found, "sampled": counts(sampled)})


def timed(
    subject: Subject, build: dict[str, Any], asked: Asked, shown: Callable[..., Iterable[Any]]
) -> dict[str, Any]:
    """Greedily, one prompt after the other, drafted and plain in turn."""
    make = drafter_maker(subject.network, build)
    options = asked.options | {"max_new_tokens": subject.new_tokens}
    trials = compare(subject.network, make, shown(subject.prompts[SPLIT]), repeats=asked.repeats, **options)
    return greedy(trials)


def with_intervals(measured: dict[str, Any]) -> dict[str, Any]:
    """What was measured greedily, with intervals over prompts."""
    prompts = measured["greedy"]["prompts"]
    tau = as_sums(prompts, "tokens", "steps")
    fast = None
    if prompts[0]["seconds"] is not None:
        fast = of_speedup(as_sums(prompts, "tokens", "seconds"), as_sums(prompts, "tokens", "plain_seconds"))
    return measured | {"speedup_interval": fast, "tau_interval": of_ratio(tau)}


def as_sums(prompts: list[dict[str, Any]], above: str, below: str) -> np.ndarray:
    """[1, P, 2]"""
    return np.array([[[one[above], one[below]] for one in prompts]], dtype=float)


def costs(subject: Subject, build: Build | None, asked: Asked) -> dict[str, Any]:
    """What steps cost here, timed: `prices` of steps that draft 0 ... longest tokens, c, and scoring n+1
    tokens."""
    text = Text(subject.prompts[SPLIT][0], [], Sampling(), subject.new_tokens)
    scored = scoring(subject.network, text)
    length, longest = max(asked.num_draft_tokens, 1), max(asked.longest, asked.num_draft_tokens)
    verify = scored(asked.num_draft_tokens) / scored(0)
    if build is None:
        return {"prices": [1.0] * (longest + 1), "c": None, "verify": verify}
    found = prices(subject.network, text, build, scored, length, longest)
    return {"prices": found["prices"], "c": found["c"], "verify": verify}
