"""Verifiers integrated exactly over their uniforms, and the law of what they emit summed over all drafts.

A verifier is a function of u in which every test is a threshold on one uniform. `integrate` finds the
thresholds by bisection, to 2^-40, and asserts that the verdict depends on u in no other way; it knows nothing
of what the verifier computes. Shapes: R rows (one draft each), N nodes, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from decoding import Draft, Verdict
from decoding.tree import ancestors, depths

Verify = Callable[[Tensor, Draft, Tensor], Verdict]
TOP = 2**40  # uniforms are multiples of 1 / TOP: an error of 1e-12 in every probability


@dataclass(frozen=True)
class Outcomes:
    """What a verifier does with each draft."""

    chance: Tensor  # [R, N+1] that the accepted path ends at this node
    law: Tensor  # [R, N+1, V] of the next token then, where that can be

    def accepted(self, parents: Tensor) -> Tensor:
        """Expected number of accepted tokens [R]."""
        return (self.chance * depths(parents)).sum(1)

    def reached(self, parents: Tensor) -> Tensor:
        """Probability [R, N+1] that each node is accepted."""
        return (self.chance[:, :, None] * ancestors(parents)).sum(1)


def integrate(verify: Verify, p: Tensor, draft: Draft) -> Outcomes:
    """The exact law of the verdict on p [R, N+1, V] and R drafts."""
    threshold = thresholds(verify, p, draft)
    chance, tests = leaves(verify, p, draft, threshold)
    row, node = (chance > 0).nonzero(as_tuple=True)
    steps = torch.ones(*chance.shape, p.shape[2] - 1, dtype=torch.float64)  # mass of the tokens 0 ... v
    steps[row, node] = next_thresholds(verify, p[row], only(draft, row), tests[row, node])
    confirm(verify, p, draft, threshold, steps)
    law = torch.diff(steps, prepend=torch.zeros_like(steps[..., :1]), append=torch.ones_like(steps[..., :1]))
    return Outcomes(chance, law)


def leaves(verify: Verify, p: Tensor, draft: Draft, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The chance [R, N+1] of every end, and uniforms [R, N+1, N+1] that lead there."""
    (rows, count), nodes = threshold.shape, torch.arange(threshold.shape[1] + 1)
    passed = torch.tensor(list(product((True, False), repeat=count)), dtype=torch.bool)  # [2^N, N]
    weight = torch.where(passed, threshold[:, None], 1 - threshold[:, None]).prod(-1)  # [R, 2^N]
    row = torch.arange(rows).repeat_interleave(len(passed))
    every, u = only(draft, row), marks(passed).repeat(rows, 1)
    end = ends(every, verify(p[row], every, u)).reshape(weight.shape)
    chance = torch.zeros(rows, count + 1, dtype=torch.float64).scatter_add_(1, end, weight)
    leading = (end[:, None] == nodes[:, None]) & (weight > 0)[:, None]  # [R, N+1, 2^N]
    return chance, marks(passed)[leading.int().argmax(2)]


def thresholds(verify: Verify, p: Tensor, draft: Draft) -> Tensor:
    """The u [R, N] from which on each node is rejected while its ancestors pass and all others fail."""
    rows, count = draft.tokens.shape
    under = ancestors(draft.parents)[:, 1:, 1:].reshape(rows * count, count)
    again = torch.arange(rows).repeat_interleave(count)
    p, draft = p[again], only(draft, again)
    node, row = torch.arange(count).repeat(rows), torch.arange(rows * count)

    def passes(value: Tensor) -> Tensor:
        u = marks(under)
        u[row, node] = value
        return verify(p, draft, u).accepted[row, node + 1]

    return bisect(passes, rows * count).reshape(rows, count)


def next_thresholds(verify: Verify, p: Tensor, draft: Draft, u: Tensor) -> Tensor:
    """Mass [R, V-1] of the next tokens 0 ... v, the nodes being tested by u [R, N+1]."""
    rows, size = len(p), p.shape[2] - 1
    again = torch.arange(rows).repeat_interleave(size)
    p, draft, tests = p[again], only(draft, again), u[again]
    token = torch.arange(size).repeat(rows)

    def passes(value: Tensor) -> Tensor:
        return verify(p, draft, torch.cat([tests[:, :-1], value[:, None]], 1)).next_token <= token

    return bisect(passes, rows * size).reshape(rows, size)


def bisect(passes: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """The share [count] of uniforms 0/TOP, 1/TOP, ... that pass; those that do come first."""
    low, high = torch.zeros(count, dtype=torch.long), torch.full((count,), TOP)
    for _ in range(TOP.bit_length()):
        middle = (low + high) // 2
        passed = passes(middle.clamp(max=TOP - 1).double() / TOP) & (low < high)
        low, high = torch.where(passed, middle + 1, low), torch.where(passed, high, middle)
    return low.double() / TOP


def confirm(verify: Verify, p: Tensor, draft: Draft, threshold: Tensor, steps: Tensor) -> None:
    """Any u gives the verdict of its marks: random ones, and those at thresholds and just below."""
    g, again = torch.Generator().manual_seed(0), torch.arange(len(p)).repeat_interleave(6)
    p, draft, threshold, steps = p[again], only(draft, again), threshold[again], steps[again]

    def around(edges: Tensor) -> Tensor:
        near = edges - torch.randint(0, 2, edges.shape, generator=g) / TOP
        spread = torch.rand(edges.shape, generator=g, dtype=torch.float64)
        return torch.where(spread < 0.6, near, spread).clamp(0, 1 - 1 / TOP)

    tests = around(threshold)
    end = ends(draft, verify(p, draft, marks(tests < threshold)))
    steps = steps[torch.arange(len(p)), end]  # [R, V-1]
    last = around(steps[:, :1])
    verdict = verify(p, draft, torch.cat([tests, last], 1))
    assert torch.equal(ends(draft, verdict), end)
    assert torch.equal(verdict.next_token, (last >= steps).sum(1))


def marks(passed: Tensor) -> Tensor:
    """Uniforms [R, N+1] that pass (0) or fail (almost 1) every test which can be passed or failed."""
    u = torch.where(passed, 0.0, 1 - 1 / TOP).double()
    return torch.cat([u, torch.full((len(u), 1), 0.5, dtype=u.dtype)], 1)


def ends(draft: Draft, verdict: Verdict) -> Tensor:
    """Where every accepted path ends [R]; asserts that it is a path of used nodes."""
    row = torch.arange(len(verdict.accepted))
    end = (verdict.accepted * torch.arange(verdict.accepted.shape[1])).amax(1)
    assert torch.equal(ancestors(draft.parents)[row, end], verdict.accepted)
    assert not (verdict.accepted[:, 1:] & (draft.parents < 0)).any()
    return end


def only(draft: Draft, rows: Tensor) -> Draft:
    """These rows of a draft, in this order."""
    return Draft(draft.tokens[rows], draft.parents[rows], None if draft.q is None else draft.q[rows])


class Models:
    """Laws p and q of the next token, each a random function of the whole text so far (up to 3 tokens)."""

    def __init__(self, seed: int, size: int = 3, sharpness: float = 1.0, depth: int = 4, zeros: str = ""):
        g = torch.Generator().manual_seed(seed)
        self.p, self.q = ([random_law(g, [size] * k, size, sharpness) for k in range(depth)] for _ in "pq")
        for name in zeros:  # laws without their least probable token
            setattr(self, name, [without_least(law) for law in getattr(self, name)])

    def joint(self, length: int) -> Tensor:
        """The target's law of the first `length` tokens, [V^length]."""
        mass = torch.ones(1, dtype=torch.float64)
        for law in self.p[:length]:
            mass = (mass[:, None] * law.reshape(len(mass), -1)).flatten()
        return mass


def random_law(g: torch.Generator, shape: list[int], size: int, sharpness: float) -> Tensor:
    return (sharpness * torch.randn(*shape, size, generator=g, dtype=torch.float64)).softmax(-1)


def without_least(law: Tensor) -> Tensor:
    law = law.scatter(-1, law.argmin(-1, keepdim=True), 0.0)
    return law / law.sum(-1, keepdim=True)


def all_drafts(models: Models, parents: list[int], kind: str) -> tuple[Tensor, Tensor, Draft]:
    """Every draft of a tree: its probability [R], the target's laws [R, N+1, V] and the draft.

    kind says how siblings come about: "iid" from q; "distinct" from q without replacement; "sure" the most
    probable ones; "mixed" the first from q, then the most probable ones that are left.
    """
    size, count = len(models.p[0]), len(parents)
    tokens = torch.tensor(list(product(range(size), repeat=count)), dtype=torch.long)  # [R, N]
    weight, q = torch.ones(len(tokens)).double(), torch.zeros(*tokens.shape, size).double()
    for n, parent in enumerate(parents):
        elder = [m for m in range(n) if parents[m] == parent]
        law = at(models.q, tokens, parents, parent)
        if kind != "iid":
            law = law.scatter(1, tokens[:, elder], 0.0)
        if kind == "sure" or (kind == "mixed" and elder):
            law = torch.zeros_like(law).scatter(1, law.argmax(1, keepdim=True), 1.0)
        q[:, n] = law / law.sum(1, keepdim=True)
        weight = weight * q[:, n].gather(1, tokens[:, n, None])[:, 0]
    p = torch.stack([at(models.p, tokens, parents, node) for node in range(count + 1)], 1)
    kept = weight > 0
    rows = torch.tensor(parents, dtype=torch.long).expand(int(kept.sum()), -1)
    return weight[kept], p[kept], Draft(tokens[kept], rows, q[kept])


def path(parents: list[int], node: int) -> list[int]:
    """Nodes from below the root down to this one."""
    return [] if node == 0 else [*path(parents, parents[node - 1]), node]


def at(laws: list[Tensor], tokens: Tensor, parents: list[int], node: int) -> Tensor:
    """The law [R, V] after the path to a node."""
    above = path(parents, node)
    if not above:
        return laws[0].expand(len(tokens), -1)
    return laws[len(above)][tuple(tokens[:, n - 1] for n in above)]


def emitted(models: Models, weight: Tensor, draft: Draft, parents: list[int], outcomes: Outcomes) -> Tensor:
    """The law of the accepted path and next token, completed from p to the tree's depth + 1: [V^length]."""
    size, depth = len(models.p[0]), max(len(path(parents, node)) for node in range(len(parents) + 1))
    mass = [torch.zeros(size**k, size, dtype=torch.float64) for k in range(depth + 1)]
    for node in range(len(parents) + 1):
        above = path(parents, node)
        code = torch.zeros(len(weight), dtype=torch.long)
        for n in above:
            code = code * size + draft.tokens[:, n - 1]
        share = (weight * outcomes.chance[:, node])[:, None] * outcomes.law[:, node]
        mass[len(above)].index_add_(0, code, share)
    whole = mass[0]
    for k in range(1, depth + 1):
        whole = whole.reshape(-1, 1) * models.p[k].reshape(-1, size) + mass[k]
    return whole.flatten()
