"""The settings, seeds and room of every row, as one step of the loop sees them."""

import torch
from torch import Tensor

from decoding import noise
from decoding.draft import Draft
from decoding.sampling import RowSampling, draw, law


class StepContext:
    """Laws and draws of one step; see decoding.draft.Context."""

    def __init__(
        self, sampling: RowSampling, seeds: Tensor, room: list[int], step: int, num_draft_tokens: int
    ):
        self.sampling = sampling
        self.seeds = seeds  # [B] int64
        self.room = room
        self.step = step
        self.draws = noise.uniforms(seeds, step, noise.DRAFT, num_draft_tokens + 1)

    def law(self, logits: Tensor, path: Tensor) -> Tensor:
        return law(logits[:, None], self.sampling)[:, 0]

    def draw(self, law: Tensor, depth: int, node: int) -> tuple[Tensor, Tensor | None]:
        tokens = draw(law, self.draws[:, node])
        return tokens, None if self.sampling.all_greedy else law

    def laws(self, logits: Tensor, draft: Draft) -> Tensor:
        """The target's law [B, N+1, V] after root and every node."""
        return law(logits, self.sampling)

    def uniforms(self, draft: Draft) -> Tensor:
        """[B, N+1]: column n-1 tests node n, the last draws the next token.

        That one has a role of its own: N is the longest draft of the batch, and a row must not depend on it.
        """
        tests = noise.uniforms(self.seeds, self.step, noise.ACCEPT, draft.tokens.shape[1])
        return torch.cat([tests, noise.uniforms(self.seeds, self.step, noise.NEXT, 1)], dim=1)
