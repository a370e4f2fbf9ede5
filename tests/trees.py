"""The loop with scripted verdicts on trees."""

import pytest
import torch

from decoding import Draft, Drafter
from decoding.draft import Verdict
from decoding.draft_length import FixedLength
from decoding.generate import GREEDY
from decoding.loop import Verifier, decode
from decoding.prompts import Prompt
from decoding.rows import Row
from decoding.stopping import Limits, Output
from decoding.tree import ancestors
from mtp import Network

ENDS = (0, 3, 1, 7, 2, 5)  # the node at which a step's accepted path ends, modulo what was drafted


def tree_steps(
    network: Network, drafter: Drafter, prompts: list[list[int]], *, length: int = 3, steps: int = len(ENDS)
) -> list[tuple[list[list[int]], Draft]]:
    """The texts as they stood before every step, and what was drafted then; other verdicts for every row."""
    found: list[tuple[list[list[int]], Draft]] = []
    rows = [Row(i, Prompt(p, None), GREEDY, i, Output(p, Limits(60), None)) for i, p in enumerate(prompts)]
    original = drafter.propose

    def propose(root, count, context):
        if len(found) == steps:
            raise StopIteration
        found.append(([row.text() for row in rows], original(root, count, context)))
        return found[-1][1]

    def verify(p, draft, u):
        step = ENDS[len(found) - 1]
        end = [(step + row) % (1 + int((draft.parents[row] >= 0).sum())) for row in range(len(p))]
        accepted = ancestors(draft.parents)[torch.arange(len(p)), torch.tensor(end)]
        return Verdict(accepted, (draft.tokens.sum(1) * 7 + step) % p.shape[2])

    drafter.propose = propose
    with pytest.raises(StopIteration):
        decode(network, rows, drafter, FixedLength(length), Verifier(verify))
    return found
