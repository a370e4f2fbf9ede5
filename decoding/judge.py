"""What scores make of a draft, brought to the host: the path that is right, and the token after it.

Verifiers look at laws, which takes several passes over the vocabulary for every node. Where nothing is left
to chance, in greedy and in coupled rows, every law is a one-hot, and all verifiers agree on a walk that
compares ids. Shapes: B rows, N draft nodes, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.context import StepContext
from decoding.draft import Draft, Verdict
from mtp.trunk import TrunkOutput

Lines = list[list[int]]  # one line a row


def follow(choices: Lines, tokens: Lines, parents: Lines) -> tuple[Lines, list[int]]:
    """Every row's accepted path, root first, and the token after it; choices [B][N+1] are the target's tokens
    after root and nodes.

    A node is accepted with chance min(1, p/q): 1 if it is the one token that p allows, else 0, whatever q.
    What is left of a one-hot p after a rejection is p, so siblings are tested against the same token, and the
    first that is it is taken. Typical acceptance asks for p(x) above a bound below 1, which is the same here.

    Node 1 is wrong, node 2 right, node 3 below it wrong:

    >>> follow([[7, 8, 9, 5]], [[6, 7, 8]], [[0, 0, 2]])
    ([[0, 2]], [9])
    """
    paths, following = [], []
    for chosen, line, hangs in zip(choices, tokens, parents, strict=True):
        path, end = [0], 0
        for node, (token, parent) in enumerate(zip(line, hangs, strict=True), start=1):
            if parent == end and token == chosen[end]:
                path.append(node)
                end = node
        paths.append(path)
        following.append(chosen[end])
    return paths, following


@dataclass(frozen=True, slots=True)
class Verifier:
    """A rule that accepts drafts. Coupled: laws are made one-hot by the position's noise before it looks."""

    verify: Callable[[Tensor, Draft, Tensor], Verdict]
    coupled: bool = False
    lossless: bool = True
    trees: bool = True  # whether it tests siblings
    reach: Callable[[Tensor, Draft], Tensor] | None = None  # [B, N] a chain's chances; see decoding.reach
    # `verify` for one-hot laws, as `follow`; None: it wants to see laws
    certain: Callable[[Lines, Lines, Lines], tuple[Lines, list[int]]] | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict on the host."""

    paths: Lines  # accepted nodes, root first
    tokens: Lines  # what the row emits: the tokens of these nodes but the root's, and the one after
    next_token: Tensor  # [B]
    seen: tuple[Tensor, Verdict] | None = None  # p [B, N+1, V] and the verdict, where laws were looked at

    def keep(self, width: int) -> Tensor:
        """[B, width] bool, on the CPU: the accepted nodes."""
        if width == 1:  # plain decoding
            return torch.ones(len(self.paths), 1, dtype=torch.bool)
        nodes = range(width)
        return torch.tensor([[node in path for node in nodes] for path in self.paths])


def judge(
    verifier: Verifier, context: StepContext, scored: TrunkOutput, draft: Draft, *, parents: Lines, laws: bool
) -> Judged:
    """The verdict on what the trunk said after root and nodes, its logits [B, N+1, V]; `laws`: they are
    wanted whatever can be done without them."""
    logits = scored.logits
    assert logits is not None
    if context.certain and verifier.certain is not None and not laws:
        known = scored.best if context.takes_best else None
        choices, tokens = to_host(context.choices(logits, draft) if known is None else known, draft.tokens)
        paths, following = verifier.certain(choices, tokens, parents)
        root = torch.tensor(following).to(logits.device, non_blocking=True)
        return Judged(paths, emitted(paths, tokens, following), root)
    p = context.laws(logits, draft)
    verdict = verifier.verify(p, draft, context.uniforms(draft))
    kept, tokens, ends = to_host(verdict.accepted, draft.tokens, verdict.next_token[:, None])
    paths = [[node for node, true in enumerate(line) if true] for line in kept]
    following = [token for (token,) in ends]
    return Judged(paths, emitted(paths, tokens, following), verdict.next_token, (p, verdict))


def emitted(paths: Lines, tokens: Lines, following: list[int]) -> Lines:
    """The tokens of accepted nodes, then the next one.

    >>> emitted([[0, 2]], [[6, 7, 8]], [9])
    [[7, 9]]
    """
    lines = zip(paths, tokens, following, strict=True)
    return [[*(line[node - 1] for node in path[1:]), token] for path, line, token in lines]


def to_host(*parts: Tensor) -> list[Lines]:
    """Tensors [B, ...] as lists, for which a device is waited for once."""
    if parts[0].is_cpu:
        return [part.tolist() for part in parts]
    together = torch.cat(parts, dim=1).cpu()
    return [part.tolist() for part in together.split([part.shape[1] for part in parts], dim=1)]
