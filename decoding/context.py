"""The settings, seeds, texts and room of every row, as one step of the loop sees them.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import noise
from decoding.coupling import coupled_choice
from decoding.draft import Draft
from decoding.processors import Processor, processed
from decoding.sampling import RowSampling, best, draw, law
from decoding.tree import depths


class StepContext:
    """Laws and draws of one step; see decoding.draft.Context.

    texts are the rows' tokens up to and including the root, where there are rules (their logits processors);
    lengths says how many these are. `coupled` turns every law into the one-hot that the noise of its position
    picks.
    """

    def __init__(
        self,
        sampling: RowSampling,
        seeds: Tensor,  # [B] int64
        room: list[int],
        step: int,
        num_draft_tokens: int,
        *,
        texts: Sequence[list[int]] = (),
        lengths: Sequence[int] | None = None,
        rules: Sequence[list[Processor]] = (),
        coupled: bool = False,
    ):
        self.sampling, self.seeds, self.room, self.step = sampling, seeds, room, step
        self.texts, self.coupled, self.num_draft_tokens = texts, coupled, num_draft_tokens
        self.lengths = [len(text) for text in texts] if lengths is None else lengths
        self.ruled = [(row, some) for row, some in enumerate(rules) if some]
        self.certain = coupled or sampling.all_greedy  # every law is a one-hot: nothing is left to chance
        self.draws: Tensor | None = None  # [B, ...] noise by node, once a drafter draws

    @property
    def takes_best(self) -> bool:
        return self.sampling.all_greedy and not self.ruled

    def law(self, logits: Tensor, path: Tensor) -> Tensor:
        if self.ruled:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
            drafted = path.tolist()
            for row, rules in self.ruled:
                logits[row] = processed(logits[row, None], [self.texts[row] + drafted[row]], rules)[0]
        return law(logits[:, None], self.sampling)[:, 0]

    def draw(self, law: Tensor, depth: int, node: int) -> tuple[Tensor, Tensor | None]:
        if self.sampling.all_greedy:
            return best(law), None
        if self.coupled:
            return coupled_choice(law, self.seeds, self.position(depth - 1)), None
        if self.draws is None:
            self.draws = self._draws(max(self.num_draft_tokens, node) + 1)
        elif node >= self.draws.shape[1]:  # a tree has more nodes than the depths that were asked for
            self.draws = self._draws(2 * node)
        return draw(law, self.draws[:, node]), law

    def _draws(self, count: int) -> Tensor:
        return noise.uniforms(self.seeds, self.step, noise.DRAFT, count)

    def draw_siblings(
        self, law: Tensor, logits: Tensor, depth: int, nodes: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Children of one node, drawn one after the other without replacement: tokens [B, C], q [B, C, V].

        q of a child is the law given the siblings before it: theirs taken out, the rest renormalised. Where
        the law has no more tokens (a greedy one has a single one), the best by `logits` [B, V] of those that
        are left follow, which is deterministic given the siblings, so that their q is a one-hot.
        """
        seen = torch.zeros_like(law, dtype=torch.bool)
        ranks = logits.to(law.dtype).clamp(min=torch.finfo(law.dtype).min)
        tokens, laws, left = list[Tensor](), list[Tensor | None](), law
        for node in nodes:
            if tokens:
                seen = seen.scatter(1, tokens[-1][:, None], True)
                rest = law.masked_fill(seen, 0.0)
                mass = rest.sum(-1, keepdim=True)
                next_best = ranks.masked_fill(seen, -torch.inf).argmax(-1, keepdim=True)
                sure = torch.zeros_like(law).scatter(1, next_best, 1.0)
                left = torch.where(mass > 0, rest / mass, sure)
            token, q = self.draw(left, depth, node)
            tokens.append(token)
            laws.append(q)
        drawn = [q for q in laws if q is not None]
        return torch.stack(tokens, dim=1), torch.stack(drawn, dim=1) if drawn else None

    def position(self, depth: int | Tensor) -> Tensor:
        """Place [B] in the row's text of the token that follows a node at this depth (the root's is 0)."""
        return torch.tensor(self.lengths, device=self.seeds.device) + depth

    def ruled_logits(self, logits: Tensor, draft: Draft) -> Tensor:
        """Logits [B, N+1, V] after every row's processors, each node with the text that leads to it."""
        if not self.ruled:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        prefixes = paths(draft)
        for row, rules in self.ruled:
            texts = [self.texts[row] + path for path in prefixes[row]]
            logits[row] = processed(logits[row], texts, rules)
        return logits

    def target(self, logits: Tensor, draft: Draft) -> Tensor:
        """The target's own law p [B, N+1, V] after root and every node."""
        return law(self.ruled_logits(logits, draft), self.sampling)

    def choices(self, logits: Tensor, draft: Draft) -> Tensor:
        """Where every law is a one-hot (`certain`), the tokens [B, N+1] that they are at."""
        if self.sampling.all_greedy:
            return best(self.ruled_logits(logits, draft))
        p, levels = self.target(logits, draft), depths(draft.parents)
        picked = [
            coupled_choice(p[:, node], self.seeds, self.position(levels[:, node]))
            for node in range(p.shape[1])
        ]
        return torch.stack(picked, dim=1)

    def laws(self, logits: Tensor, draft: Draft) -> Tensor:
        """What drafts are verified against [B, N+1, V]: p, or under coupling the one-hot that the noise
        picks."""
        if not self.coupled:
            return self.target(logits, draft)
        zeros = torch.zeros_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        return zeros.scatter_(-1, self.choices(logits, draft)[..., None], 1.0)

    def uniforms(self, draft: Draft) -> Tensor:
        """[B, N+1]: column n-1 tests node n, the last draws the next token.

        That one has a role of its own: N is the longest draft of the batch, and a row must not depend on it.
        """
        if self.certain:
            return torch.zeros(len(self.seeds), draft.tokens.shape[1] + 1, device=self.seeds.device)
        following, count = noise.uniforms(self.seeds, self.step, noise.NEXT, 1), draft.tokens.shape[1]
        if not count:
            return following
        return torch.cat([noise.uniforms(self.seeds, self.step, noise.ACCEPT, count), following], dim=1)


def paths(draft: Draft) -> list[list[list[int]]]:
    """For every row and node the drafted tokens from the root (excluded) down to the node (included).

    >>> paths(Draft(torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1, 0]])))
    [[[], [7], [7, 8], [9]]]
    """
    rows = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        line: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            line.append([*line[max(parent, 0)], token])
        rows.append(line)
    return rows
