"""The acceptance ledger: from laws on one text to the exact expected steps and τ, with no draft sampled.

A text of T tokens x that the target wrote, laws p given the text before each of them, and for every root and
depth the drafter's law q given the true tokens in between. That determines how many steps speculative
decoding takes on this very text, in expectation over its own draws, for every draft length and verifier.
Shapes: T emitted tokens, D depths, V vocabulary; everything is float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def ahead(values: Tensor, depth: int) -> Tensor:
    """values [T, ...], one an emitted token -> [D, T, ...]: entry [j-1, t] is that of token t+j-1, 0 beyond
    the end.

    Root t is the token before token t, so t tokens are emitted when its step starts, and its draft at depth j
    is about token t+j-1. Tokens 5 6 7: root 0 (the prompt's last token) drafts them at depths 1, 2 and 3;
    root 2, the token 6, has only the 7 before it, at depth 1.

    >>> ahead(torch.tensor([5, 6, 7]), 2)
    tensor([[5, 6, 7],
            [6, 7, 0]])
    """
    padded = torch.cat([values, values.new_zeros(depth, *values.shape[1:])])
    return torch.stack([padded[j : j + len(values)] for j in range(depth)])


def ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """q(x)/p(x) for laws [..., V] and tokens x [...]; where p(x) is 0, 0 if q(x) is too, else infinite."""
    p_x, q_x = (law.gather(-1, tokens[..., None])[..., 0].double() for law in (p, q))
    return (q_x / p_x).nan_to_num(nan=0.0, posinf=torch.inf)


def match(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Chance that coupled draws agree, given that the target's is x: 1 / (p_x Σ_y max(p_y/p_x, q_y/q_x)).

    Arguments as in `ratio`. Draft and target take argmax(log q + G) and argmax(log p + G) with one noise G;
    both are x with probability 1 / Σ_y max(p_y/p_x, q_y/q_x).
    """
    p, q, at = p.double(), q.double(), tokens[..., None]
    p_x, q_x = p.gather(-1, at), q.gather(-1, at)
    return (q_x[..., 0] / torch.maximum(p * q_x, q * p_x).sum(-1)).nan_to_num(nan=0.0).clamp(max=1.0)


def ratios(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """r [D, T] of tokens [T], p [T, V] and q [D, T, V]: r[j-1, t] = q[j-1, t](x) / p[t+j-1](x), x = token
    t+j-1.

    q[j-1, t] is the drafter's law for token t+j-1 at depth j after root t, given the true tokens before it;
    all zeros where it drafts nothing.
    """
    return ratio(ahead(p, len(q)), q, ahead(tokens, len(q))).where(inside(q), 0.0)


def matches(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The same for `match`: [D, T]."""
    return match(ahead(p, len(q)), q, ahead(tokens, len(q))).where(inside(q), 0.0)


def inside(q: Tensor) -> Tensor:
    """[D, T] bool: whether depth j of root t is about a token that the text has."""
    depth, root = torch.arange(len(q), device=q.device)[:, None], torch.arange(q.shape[1], device=q.device)
    return root + depth < q.shape[1]


def survival_token(r: Tensor) -> Tensor:
    """S [D, T]: a step from root t accepts at least j tokens with probability S[j-1, t], token by token.

    The draft is x_1 ... x_j with probability Π q and then accepted with Π min(1, p/q); given that the text
    says so, which has probability Π p, that is Π min(1, r). Greedy laws are one-hot and need nothing else.
    """
    return r.clamp(max=1.0).cumprod(0)


def survival_block(r: Tensor) -> Tensor:
    """The same for block verification, which accepts x_1 ... x_j with P_j = min(1, P_{j-1} p/q).

    So S_j = P_j Π r = min over i = 0 ... j of Π_{l <= i} r_l, the empty product being 1.
    """
    return r.log().clamp(max=700.0).cumsum(0).cummin(0).values.clamp(max=0.0).exp()


def survival_coupled(m: Tensor) -> Tensor:
    """The same for coupled draws, from `matches`: noise at different positions is independent."""
    return m.cumprod(0)


@dataclass(frozen=True, slots=True)
class Expected:
    """What decoding.acceptance counts, in expectation over the draws of a run that emits this text."""

    visits: list[float]  # [T] probability that a step starts after t tokens
    variance: float  # of the number of steps
    tested_at_depth: list[float]
    accepted_at_depth: list[float]

    @property
    def steps(self) -> float:
        return sum(self.visits)


def expected(survival: Tensor, length: int, tested: Tensor | None = None) -> Expected:
    """Follow the steps over a text: survival [D, T], drafts of `length` tokens, D at most.

    Steps start more often where drafts fail, so averaging over positions would not do. A step starts after t
    tokens with probability v_t: v_0 = 1, and v_{t+i+1} gains v_t (S_{t,i} - S_{t,i+1}), with S_{t,0} = 1 and
    S_{t,length+1} = 0. tested [D, T] is 1 where depth j is drafted if depth j-1 was accepted; without it,
    wherever the text goes on. The room left needs no cut here: a step that it cuts reaches the text's end.

    Two tokens, each accepted half of the time: one step or two.

    >>> expected(torch.tensor([[0.5, 0.5]]), 1).visits
    [1.0, 0.5]
    """
    size = survival.shape[1]
    tested = inside(survival[:length]) if tested is None else tested[:length]
    at_least = torch.cat([survival.new_ones(1, size), survival[:length]]).double()  # [length+1, T]
    exactly = at_least.diff(dim=0, append=at_least.new_zeros(1, size)).neg().T.tolist()
    visits = [1.0] + [0.0] * (size - 1) if size else []
    for t, visit in enumerate(visits):
        for i, chance in enumerate(exactly[t][: size - t - 1]):
            visits[t + i + 1] += visit * chance
    weight = torch.tensor(visits, dtype=torch.float64, device=survival.device)
    return Expected(
        visits,
        variance(exactly),
        ((at_least[:-1] * tested) @ weight).tolist(),
        ((at_least[1:] * tested) @ weight).tolist(),
    )


def variance(exactly: list[list[float]]) -> float:
    """Of the number of steps, from [T][length+1] chances of accepting just i tokens, back from the end."""
    size = len(exactly)
    mean, square = [0.0] * (size + 1), [0.0] * (size + 1)  # moments of the steps to come after t tokens
    for t in reversed(range(size)):
        ends = [(chance, min(t + i + 1, size)) for i, chance in enumerate(exactly[t])]
        rest = sum(chance * mean[end] for chance, end in ends)
        mean[t], square[t] = 1 + rest, 1 + 2 * rest + sum(chance * square[end] for chance, end in ends)
    return max(0.0, square[0] - mean[0] ** 2)
