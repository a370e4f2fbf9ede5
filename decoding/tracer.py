"""Keeps, while decoding, what every step drafted, accepted, rejected and supplied.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.rows import Row
from decoding.text import REPLACEMENT, Detokenizer
from decoding.trace import Node, Step, Story

BEST = 3  # tokens kept that the trunk found likeliest


@dataclass(slots=True)
class Telling:
    """A story as it comes to be."""

    row: Row
    story: Story
    detokenizer: Detokenizer | None
    told: int = 0  # emitted tokens told so far


class Tracer:
    """Called by the loop after every step; `stories` are the prompts in the order in which they began."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.known: dict[int, Telling] = {}  # by the row's id, which is not reused while the row is held

    @property
    def stories(self) -> list[Story]:
        for told in self.known.values():
            told.story.acceptance, told.story.finish_reason = (
                told.row.acceptance,
                told.row.output.finish_reason,
            )
        return [told.story for told in self.known.values()]

    def __call__(self, rows: list[Row], draft: Draft, p: Tensor, logits: Tensor, verdict: Verdict) -> None:
        """p and logits [B, N+1, V] after root and nodes; the rows hold the step's tokens already."""
        count = torch.arange(p.shape[1], device=p.device)
        last = (verdict.accepted * count).amax(1, keepdim=True)  # [B, 1]
        parents = torch.cat(
            [draft.parents, last], dim=1
        )  # the supplied token hangs on the last accepted node
        tokens = torch.cat([draft.tokens, verdict.next_token[:, None]], dim=1)  # [B, N+1]
        own = logits.float().softmax(-1)
        at = (torch.arange(len(p), device=p.device)[:, None], parents.clamp(min=0), tokens)
        q = None if draft.q is None else draft.q.gather(2, draft.tokens[..., None])[..., 0].tolist()
        best = own.topk(min(BEST, own.shape[-1]), dim=-1)
        columns = (
            tokens.tolist(), parents.tolist(), p[at].tolist(), own[at].tolist(), best.indices.tolist(),
            best.values.tolist(), verdict.accepted.tolist(),
        )  # fmt: skip
        for index, (row, values) in enumerate(zip(rows, zip(*columns, strict=True), strict=True)):
            self._add(row, None if q is None else q[index], *values)

    def _add(
        self, row: Row, q: list[float] | None, tokens: list[int], parents: list[int], p: list[float],
        own: list[float], ids: list[list[int]], chances: list[list[float]], accepted: list[bool],
    ) -> None:  # fmt: skip
        if id(row) not in self.known:
            self.known[id(row)] = self._begin(row)
        telling = self.known[id(row)]
        pieces = self._pieces(telling)
        states = [*node_states(parents[:-1], accepted, len(pieces)), "supplied"]
        nodes = [
            Node(
                n + 1, self._text(tokens[n]), max(parents[n], 0), states[n], p[n],
                q[n] if q is not None and n < len(q) else None, own[n],
                tuple((self._text(i), c) for i, c in zip(ids[parents[n]], chances[parents[n]], strict=True)),
            )
            for n in range(len(tokens)) if states[n]
        ]  # fmt: skip
        supplied = nodes[-1] if len(pieces) == sum(accepted) else None
        telling.story.steps.append(Step(tuple(nodes[:-1]), supplied, pieces))

    def _begin(self, row: Row) -> Telling:
        ids, text = row.prompt.ids, row.prompt.text
        story = Story("".join(map(self._text, ids)) if text is None else text)
        return Telling(row, story, Detokenizer(self.tokenizer, ids) if self.tokenizer else None)

    def _pieces(self, telling: Telling) -> tuple[str, ...]:
        output, reader = telling.row.output, telling.detokenizer
        new = output.token_ids[telling.told :]
        telling.told = len(output.token_ids)
        pieces = [self._text(token) if reader is None else reader.push(token) for token in new]
        if reader is not None and output.finish_reason is not None:
            pieces[-1] += reader.flush()
        return tuple(pieces)

    def _text(self, token: int) -> str:
        if self.tokenizer is None:
            return f"{token} "
        text = self.tokenizer.decode([token])
        return f"⟨{token}⟩" if not text or REPLACEMENT in text else text


def node_states(parents: list[int], accepted: list[bool], emitted: int) -> list[str]:
    """What became of every draft node; "" for an unused one. `accepted` has the root first.

    A node was rejected when its parent was accepted and no earlier sibling was; emitted tokens end the path.

    >>> node_states([0, 1, 0, 3, -1], [True, False, False, True, False, False], 2)
    ['rejected', 'unreached', 'accepted', 'rejected', '']
    """
    states, depth, taken = [], [0], set[int]()
    for node, parent in enumerate(parents, start=1):
        depth.append(depth[max(parent, 0)] + 1)
        if parent < 0:
            states.append("")
        elif accepted[node]:
            taken.add(parent)
            states.append("accepted" if depth[node] <= emitted else "cut")
        else:
            states.append("rejected" if accepted[parent] and parent not in taken else "unreached")
    return states
