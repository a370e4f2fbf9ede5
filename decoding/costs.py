"""What a step costs here, by the number of tokens drafted: a few dozen calls, every draft rejected.

The steps run in the real loop with the real drafter, so that scoring the wider block, what an early exit gets
back, and what a verifier computes are all in the time.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.draft import Context, Draft, Drafter, Verdict
from decoding.draft_length import Costs
from decoding.generate import VERIFIERS, Verifier, decode, new_row
from decoding.replay import Text
from decoding.rows import Row
from mtp import Network

WARM, CALLS = 1, 5  # steps before the clock counts, steps that count, for every length


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
        missing = num_draft_tokens - draft.tokens.shape[1]
        if draft.q is not None or draft.exit_layer or missing <= 0:
            return draft
        tokens = torch.cat([draft.tokens, draft.tokens.new_zeros(len(root), missing)], dim=1)
        return Draft(tokens, torch.arange(num_draft_tokens, device=root.device).expand_as(tokens))

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)


class Rehearsal:
    """Draft length and verdict of a run whose drafts are all rejected once the verifier has had its say."""

    def __init__(self, length: int, verifier: Verifier, last: int, costs: Costs):
        self.most, self.verifier, self.last, self.costs = length, verifier, last, costs
        self.step = 0

    def ask(self, rows: list[int]) -> list[int]:
        return [self.most] * len(rows)

    def learn(self, row: int, tested: int, accepted: int) -> None:
        pass

    def took(self, drafted: int, seconds: float) -> None:
        if self.step > WARM:
            self.costs.add(drafted, seconds)

    def verify(self, p: Tensor, draft: Draft, u: Tensor) -> Verdict:
        self.step += 1
        verdict = self.verifier.verify(p, draft, u)
        accepted = torch.zeros_like(verdict.accepted)
        accepted[:, 0] = True
        over = self.step == WARM + CALLS
        return Verdict(accepted, verdict.next_token.masked_fill(torch.tensor(over), self.last))


def measure(
    network: Network, texts: Sequence[Text], drafter: Drafter, verifier: str, lengths: Sequence[int]
) -> Costs:
    """Seconds of a step over these texts' prompts together, drafting so many tokens (0: plain decoding)."""
    costs, rule = Costs(), VERIFIERS[verifier]
    for length in lengths:
        run = Rehearsal(length, rule, network.trunk.vocab_size, costs)
        limit = WARM + CALLS + length + 1  # leaves room for every draft
        rows = [endless_row(network, index, text, limit) for index, text in enumerate(texts)]
        decode(network, rows, Filled(drafter), run, Verifier(run.verify, rule.coupled))
    return costs


def endless_row(network: Network, index: int, text: Text, limit: int) -> Row:
    """A row with the end of the text's prompt. It stops at an id beyond the vocabulary, before its limit."""
    return new_row(
        network, index=index, prompt=text.prompt_ids[-max(1, network.trunk.context - limit) :],
        sampling=dataclasses.replace(text.sampling, min_new_tokens=0), seed=index, max_new_tokens=limit,
        stop=(), eos=(network.trunk.vocab_size,), device=network.trunk.device,
    )  # fmt: skip
