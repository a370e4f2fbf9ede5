"""What a step costs here, by the number of tokens drafted: a few dozen steps, every draft rejected.

The steps run in the real loop with the real drafter, so that scoring the wider block, what an early exit gets
back, and what a verifier computes are all in the time.
"""

import copy
import dataclasses
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.draft import Context, Draft, Drafter, Verdict
from decoding.draft_length import CHOICES, Costs
from decoding.experience import Experience
from decoding.judge import Lines, Verifier, follow
from decoding.loop import VERIFIERS, decode
from decoding.replay import Text
from decoding.rows import Row, new_row
from mtp import Network

WARM, CALLS = 1, 5  # steps before the clock counts, steps that count, for every length
# For automatic length: which lengths are timed, how often, how much of a prompt stands before them, and for
# how many seconds this goes on where steps are short.
LENGTHS, FEW, TAIL, ENOUGH = (0, 1, 0, 1, 4, 0, 1, CHOICES[-1]), 3, 32, 0.2


class Filled:
    """A drafter whose lookups are filled up with any tokens, so that every length can be timed."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.taps = drafter.taps

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.drafter.reset(batch_size, cache)

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.drafter.extend(tokens, states, keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        draft = self.drafter.propose(root, num_draft_tokens, context)
        wanted = min(num_draft_tokens, max(context.room))
        missing = wanted - draft.tokens.shape[1]
        if draft.q is not None or draft.exit_layer or missing <= 0:
            return draft
        tokens = torch.cat([draft.tokens, draft.tokens.new_zeros(len(root), missing)], dim=1)
        return Draft(tokens, torch.arange(wanted, device=root.device).expand_as(tokens))

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)


class Rehearsal:
    """Draft lengths and verdicts of a run whose drafts are all rejected once the verifier has had its say.

    Every length is asked for WARM + calls times, in turns, so that what else the machine does for a while
    meets all of them; a step lasts from one question to the next.
    """

    learns = False

    def __init__(self, lengths: Sequence[int], calls: int, verifier: Verifier, last: int):
        self.most, self.verifier, self.last, self.costs = max(lengths), verifier, last, Costs()
        self.plan = [(length, call >= WARM) for call in range(WARM + calls) for length in lengths]
        self.step, self.began = 0, 0.0

    def ask(self, rows: list[int]) -> list[int]:
        self.clock()
        return [self.plan[self.step][0]] * len(rows)

    def clock(self) -> None:
        """Now the step before is over."""
        now = time.perf_counter()
        if self.step and self.plan[self.step - 1][1]:
            self.costs.add(self.plan[self.step - 1][0], now - self.began)
        self.began = now

    def learn(self, row: int, drafted: int, reached: list[float]) -> None:
        pass

    @property
    def over(self) -> bool:
        return self.step == len(self.plan)

    def verify(self, p: Tensor, draft: Draft, u: Tensor) -> Verdict:
        self.step += 1
        verdict = self.verifier.verify(p, draft, u)
        accepted = torch.zeros_like(verdict.accepted)
        accepted[:, 0] = True
        return Verdict(accepted, verdict.next_token.masked_fill(torch.tensor(self.over), self.last))

    def certain(self, choices: Lines, tokens: Lines, parents: Lines) -> tuple[Lines, list[int]]:
        """`verify` where it compares ids."""
        self.step += 1
        _, following = follow(choices, tokens, parents)
        return [[0] for _ in choices], [self.last] * len(choices) if self.over else following


def measure(
    network: Network, texts: Sequence[Text], drafter: Drafter, verifier: str, lengths: Sequence[int],
    *, calls: int = CALLS,
) -> Costs:  # fmt: skip
    """Seconds of a step after these texts' prompts together, drafting so many tokens (0: none)."""
    rule = VERIFIERS[verifier]
    run = Rehearsal(lengths, calls, rule, network.trunk.vocab_size)
    limit = len(run.plan) + run.most + 1  # leaves room for every draft
    rows = [endless_row(network, index, text, limit) for index, text in enumerate(texts)]
    rejecting = dataclasses.replace(rule, verify=run.verify, certain=run.certain)
    decode(network, rows, Filled(drafter), run, rejecting)
    run.clock()
    return run.costs


@dataclass(slots=True)
class Known:
    """What automatic length knows of one drafter: seconds of steps by verifier and number of rows, measured
    when first asked for, and what its drafts came to."""

    costs: dict[tuple[str, int], Costs] = field(default_factory=dict)
    experience: Experience = field(default_factory=Experience)


# Of drafters, and of those that were built for a name, which are new for every call.
OF_DRAFTERS: weakref.WeakKeyDictionary[Drafter, Known] = weakref.WeakKeyDictionary()
OF_NAMES: weakref.WeakKeyDictionary[Network, dict[tuple[str, str], Known]] = weakref.WeakKeyDictionary()


def known(network: Network, drafter: str | Drafter) -> Known:
    """What is known so far of this drafter, or of this network's drafter of that name."""
    if isinstance(drafter, str):
        return OF_NAMES.setdefault(network, {}).setdefault((drafter, network.form), Known())
    return OF_DRAFTERS.setdefault(drafter, Known())


def calibrated(network: Network, rows: Sequence[Row], drafter: Drafter, verifier: str, known: Known) -> Costs:
    """What steps cost with this drafter, verifier and so many rows, measured unless it is known."""
    key, costs, began = (verifier, len(rows)), Costs(), time.perf_counter()
    if key not in known.costs:
        texts = [Text(row.prompt.ids[-TAIL:], [], row.sampling, 0) for row in rows]
        while not costs.measured or time.perf_counter() - began < ENOUGH:
            costs.join(measure(network, texts, copy.copy(drafter), verifier, LENGTHS, calls=FEW))
        known.costs[key] = costs
    return known.costs[key]


def endless_row(network: Network, index: int, text: Text, limit: int) -> Row:
    """A row with the end of the text's prompt. It stops at an id beyond the vocabulary, before its limit."""
    return new_row(
        network, index=index, prompt=text.prompt_ids[-max(1, network.trunk.context - limit) :],
        sampling=dataclasses.replace(text.sampling, min_new_tokens=0), seed=index, max_new_tokens=limit,
        stop=(), eos=(network.trunk.vocab_size,), device=network.trunk.device,
    )  # fmt: skip
