"""Drafts on a text that is already known: draws forced to its tokens, and the draft followed along it.

Shapes: B rows, N draft nodes, D depths, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.draft import Context, Draft
from decoding.ledger import match, ratio

UNKNOWN = -1  # a token behind the end of a text
LOST = -2  # the node of a draft that the text has left


class Forced:
    """A step's context in which every draw gives the true token, and the law that it was asked for as q.

    Where all rows are greedy nothing is drawn by law: drafts are what they are, good until the text differs.
    """

    takes_best = False  # every draw is to be seen

    def __init__(self, context: Context, room: list[int], truth: Tensor):
        self.context, self.room = context, room
        self.truth = truth  # [B, D] the next tokens, UNKNOWN beyond the text
        self.drawn: list[tuple[Tensor, Tensor | None]] = []

    def law(self, logits: Tensor, path: Tensor) -> Tensor:
        return self.context.law(logits, path)

    def draw(self, law: Tensor, depth: int, node: int) -> tuple[Tensor, Tensor | None]:
        token, q = self.context.draw(law, depth, node)
        if q is not None:
            true = self.truth[:, depth - 1]
            token = torch.where(true == UNKNOWN, token, true)
        self.drawn.append((token, q))
        return token, q

    def draw_siblings(
        self, law: Tensor, logits: Tensor, depth: int, nodes: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        return self.context.draw_siblings(law, logits, depth, nodes)

    def drew(self, draft: Draft) -> bool:
        """Whether a draft is just what was drawn, so that a shorter one would be its beginning."""
        count = draft.tokens.shape[1]
        if count == 0 or count > len(self.drawn):
            return count == 0
        tokens, laws = zip(*self.drawn[:count], strict=True)
        if not torch.equal(draft.tokens, torch.stack(tokens, dim=1)):
            return False
        if draft.q is None or laws[0] is None:
            return draft.q is laws[0]
        return torch.equal(draft.q, torch.stack(laws, dim=1))


class Pending:
    """A draft whose rows are followed along the true text, node by node."""

    def __init__(self, draft: Draft, node: Tensor):
        self.draft = draft
        self.node = node  # [B] where the text has led; 0 the root
        self.strayed = torch.zeros_like(node, dtype=torch.bool)  # [B] q allows x, yet x is not what it drew

    def judge(self, p: Tensor, tokens: Tensor) -> Tensor:
        """[3, B]: q(x)/p(x), the coupled draws' chance to agree, and whether anything was drafted here.

        Of deterministic siblings the one that is x is accepted whenever the target says x, in any order.
        """
        draft, row = self.draft, torch.arange(len(tokens), device=tokens.device)
        here = draft.parents == self.node[:, None]  # [B, N]
        hit = here & (draft.tokens == tokens[:, None])
        tested, hits = here.any(1), hit.any(1)
        if draft.q is None:
            q = torch.zeros_like(p).scatter_(1, tokens[:, None], hits[:, None].to(p.dtype))
            matches = hits.double()
        else:
            q = draft.q[row, here.long().argmax(1)] * tested[:, None]
            matches = match(p, q, tokens)
            self.strayed = ~hits & (q[row, tokens] > 0)
        if here.shape[1]:
            self.node = torch.where(hits, hit.long().argmax(1) + 1, LOST)
        return torch.stack([ratio(p, q, tokens), matches, tested.double()])

    def select(self, rows: Tensor) -> "Pending":
        index, draft = rows.to(self.node.device), self.draft
        q = None if draft.q is None else draft.q[index]
        return Pending(Draft(draft.tokens[index], draft.parents[index], q), self.node[index])
