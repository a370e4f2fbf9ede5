"""Draft trees that go where the draft is sure (EAGLE-2, arXiv 2406.16858): deterministic children only.

A tree may be ranked and pruned by its own probabilities because nothing in it is drawn (design rule 6).
Shapes: B rows, N draft nodes, M candidates, K of a depth that are expanded, V vocabulary.
"""

import torch
from torch import Tensor

from decoding.branching import Level
from decoding.draft import Draft


class Candidates:
    """All nodes seen so far, numbered depth by depth; `expand` adds the children of the best of a depth."""

    def __init__(self, root: Tensor, top_k: int, nodes: int):
        self.top_k, self.nodes = top_k, nodes
        self.tokens: list[Tensor] = []  # [B, M] pieces, as the next two
        self.parents: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.depths: list[int] = []
        self.beam = torch.zeros_like(root)[:, None]  # [B, K] numbers of the nodes expanded next; 0: the root
        self.sums = torch.zeros_like(self.beam, dtype=torch.float64)  # [B, K] log-probability of the path

    def expand(self, logits: Tensor) -> Level:
        """Logits [B, K, V] of the beam's nodes -> the next beam: the best of all their top_k children."""
        first = len(self.depths) + 1
        best = logits.double().log_softmax(-1).topk(self.top_k, dim=-1)  # [B, K, top_k]
        scores, tokens = (self.sums[..., None] + best.values).flatten(1), best.indices.flatten(1)
        self.tokens.append(tokens)
        self.parents.append(self.beam.repeat_interleave(self.top_k, dim=1))
        self.scores.append(scores)
        self.depths += [len(self.tokens)] * scores.shape[1]
        picked = ranked(scores, self.top_k)
        self.beam, self.sums = picked + first, scores.gather(1, picked)
        return Level(tokens.gather(1, picked), picked // self.top_k)

    def draft(self, room: list[int]) -> Draft:
        """The best `nodes` candidates no deeper than a row's room, in the order of their numbers.

        No node is more probable than its parent and equals go by number, so ancestors of a node are among
        them.
        """
        scores = torch.cat(self.scores, dim=1)
        outside = torch.tensor(self.depths) > torch.tensor(room)[:, None]
        scores = scores.masked_fill(outside.to(scores.device), -torch.inf)
        picked = ranked(scores, self.nodes)  # [B, N]
        used = scores.gather(1, picked) > -torch.inf
        place = torch.zeros_like(scores, dtype=torch.long)
        place.scatter_(1, picked, torch.arange(1, picked.shape[1] + 1, device=place.device).expand_as(picked))
        place = torch.cat([torch.zeros_like(place[:, :1]), place], dim=1)  # candidate number -> node
        parents = place.gather(1, torch.cat(self.parents, dim=1).gather(1, picked))
        tokens = torch.cat(self.tokens, dim=1).gather(1, picked)
        return Draft(tokens, torch.where(used, parents, -1))


def ranked(scores: Tensor, count: int) -> Tensor:
    """Places [B, N] of the best `count` of scores [B, M], equals by place; in the order of their places."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return order.sort(dim=1).values
