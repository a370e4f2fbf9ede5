"""What a drafter gives in expectation, for every draft length and verifier, from the ledger.

Texts are the trunk's own, greedy and at temperature 1; no draft is sampled (see decoding.ledger). Shapes: D
depths, T tokens.
"""

from collections.abc import Sequence
from typing import Any

from ablation.subject import Subject
from decoding.ledger import Expected, expected
from decoding.payoff import SURVIVAL
from decoding.replay import Terms

TEMPERATURES = {"greedy": 0.0, "token": 1.0, "block": 1.0}  # of the texts that a verifier is asked about
DIGITS = 4
NEVER = 1e-9  # a depth tested less often than that in all was not drafted


def every_length(
    subject: Subject, build: dict[str, Any], split: str, longest: int, at: int
) -> dict[str, Any] | None:
    """mode -> what lengths 1 ... longest give, and `by_prompt`: mode -> prompts one by one.

    Depths are told by prompt for drafts of `at` tokens. None where the drafter's draft depends on its own
    samples, so that nothing can be computed.
    """
    heard = {
        temperature: subject.terms(build, split, temperature, longest)
        for temperature in dict.fromkeys(TEMPERATURES.values())
    }
    if not all(heard.values()):
        return None
    found: dict[str, Any] = {"by_prompt": {}}
    for mode, temperature in TEMPERATURES.items():
        by_length = heard[temperature]
        if mode == "block" and not all(term.chains for term in by_length[longest]):
            found[mode] = []  # it is a rule for chains
            continue
        told = {length: foretold(mode, length, terms) for length, terms in sorted(by_length.items())}
        found[mode] = [
            length_entry(length, by_length[length], expectations) for length, expectations in told.items()
        ]
        found["by_prompt"][mode] = by_prompt(by_length[at], told, at)
    return found


def foretold(mode: str, length: int, terms: Sequence[Terms]) -> list[Expected]:
    return [expected(SURVIVAL[mode](term), length, term.tested) for term in terms]


def length_entry(length: int, terms: Sequence[Terms], told: Sequence[Expected]) -> dict[str, Any]:
    """All texts together: τ, acceptance by depth, and how many steps draft 0, 1, ... tokens."""
    drafts = [0.0] * (length + 1)
    for term, one in zip(terms, told, strict=True):
        for visit, height in zip(one.visits, term.heights, strict=True):
            drafts[min(height, length)] += visit
    tokens, steps = sum(len(term.heights) for term in terms), sum(one.steps for one in told)
    tested = [sum(column) for column in zip(*(one.tested_at_depth for one in told), strict=True)]
    accepted = [sum(column) for column in zip(*(one.accepted_at_depth for one in told), strict=True)]
    return {
        "length": length,
        "tau": tokens / steps if steps else 1.0,
        "conditional": [kept / some for kept, some in zip(accepted, tested, strict=True) if some > NEVER],
        "tokens": tokens,
        "steps": rounded([steps])[0],
        "drafts": rounded(drafts),
    }


def by_prompt(terms: Sequence[Terms], told: dict[int, list[Expected]], at: int) -> list[dict[str, Any]]:
    """Of every text: its tokens, the steps by length, and what was tested and accepted by depth."""
    return [
        {
            "tokens": len(term.heights),
            "steps": rounded([one[index].steps for one in told.values()]),
            "tested": rounded(told[at][index].tested_at_depth),
            "accepted": rounded(told[at][index].accepted_at_depth),
        }
        for index, term in enumerate(terms)
    ]


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def speed(entry: dict[str, Any], prices: Sequence[float]) -> float:
    """Over plain decoding, when a step that drafts n tokens costs prices[n]; prefill left out.

    >>> speed({"tokens": 4, "drafts": [1.0, 1.0]}, [1.0, 1.0])
    2.0
    """
    cost = sum(count * price for count, price in zip(entry["drafts"], prices, strict=False))
    return entry["tokens"] / cost if cost else 1.0


def choose(found: dict[str, Any], prices: Sequence[float]) -> dict[str, Any]:
    """The draft length that is fastest greedily at these prices, and for it the verifier at temperature 1."""
    best = max(found["greedy"], key=lambda entry: speed(entry, prices))
    length = best["length"]
    sampled = {rule: found[rule][length - 1] for rule in ("token", "block") if found.get(rule)}
    verifier = max(sampled, key=lambda rule: speed(sampled[rule], prices)) if sampled else "token"
    return {"num_draft_tokens": length, "verifier": verifier}
