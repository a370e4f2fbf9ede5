"""Traversal verification: a draft tree is tested from its leaves up, so that a path is judged as a whole.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.sampling import draw
from decoding.tree import ancestors
from decoding.verify import verify_token


def verify_traversal(p: Tensor, draft: Draft, u: Tensor) -> Verdict:
    """Traversal verification of a tree (arXiv 2505.12398); on a chain it is block verification.

    The root has P = 1, a node n below v has P(n) = min(1, P(v) p_v(x_n)/q_n(x_n)). The leftmost leaf n that
    is left is accepted with its whole path if u_n < P(n). Otherwise it is cut off, and v goes on with
    P(v) = Z / (Z + 1 - P(v)) and p_v = R/Z, where R = max(P(v) p_v - q_n, 0) and Z is the mass of R. The next
    token follows what p has become at the end of the accepted path. Arguments as in verify_token.
    """
    if draft.tokens.shape[1] == 0:
        return verify_token(p, draft, u)
    row = torch.arange(len(p), device=p.device)
    walk, parent = Walk.through(draft.parents), rooted(draft.parents.clamp(min=0), 0)
    token, said = rooted(draft.tokens, 0), rooted(chances(draft), 1.0)  # [B, N+1]
    ratio = p[row[:, None], parent, token].double() / said
    cap, slope = descents(ratio, parent, walk)
    reach = torch.minimum(cap, slope)  # [B, N+1] P; below a younger sibling it is set when its turn comes
    laws = p.clone()  # what is left of p
    end = torch.zeros_like(row)  # [B] where the accepted path ends
    for n in walk.order.unbind(1):
        v, tested = parent[row, n], walk.used[row, n] & (end == 0)
        taken = tested & (u[row, n - 1] < reach[row, n])
        end = torch.where(taken, n, end)
        if end.is_cpu and bool((end > 0).all()):
            break  # elsewhere, to look would cost more than to go on
        cut, old_reach, old_law = tested & ~taken, reach[row, v], laws[row, v]
        q = None if draft.q is None else draft.q[row, n - 1]
        left, law = remainder(old_reach, old_law, q, token[row, n])
        reach[row, v] = torch.where(cut, left, old_reach)
        laws[row, v] = torch.where(cut[:, None], law.to(laws.dtype), old_law)
        younger = walk.younger[row, n]
        first = (left * law[row, token[row, younger]] / said[row, younger]).clamp(max=1.0)
        below = (walk.top == younger[:, None]) & (cut & (younger > 0))[:, None]
        reach = torch.where(below, torch.minimum(cap, slope * first[:, None]), reach)
    return Verdict(ancestors(draft.parents)[row, end], draw(laws[row, end], u[:, -1]))


@dataclass(frozen=True, slots=True)
class Walk:
    """How trees are traversed, whatever the order of their nodes; all but `order` are [B, N+1]."""

    order: Tensor  # [B, N] nodes in the order of their tests, unused ones at the end
    used: Tensor  # bool; the root is none of them
    younger: Tensor  # the next sibling, 0: none
    top: Tensor  # the highest node from which first children lead down to this one

    @classmethod
    def through(cls, parents: Tensor) -> "Walk":
        """A node is tested after all below it, and after its elder siblings and all below them.

        >>> walk = Walk.through(torch.tensor([[0, 0, 1, 1, 2]]))
        >>> walk.order, walk.younger, walk.top
        (tensor([[3, 4, 1, 5, 2]]), tensor([[0, 2, 0, 4, 0, 0]]), tensor([[0, 0, 2, 0, 4, 2]]))
        """
        hang = rooted(parents, -1)  # [B, N+1]
        used, node = hang >= 0, torch.arange(hang.shape[1], device=parents.device)
        siblings = (hang[:, :, None] == hang[:, None, :]) & used[:, :, None]
        elder = siblings & (node[:, None] < node)  # [B, N+1, N+1] row node: elder sibling of column node
        under = ancestors(parents)  # row node: column node itself or below it
        left = under.float() @ elder.float() @ under.float().transpose(1, 2) > 0
        before = left | (under & (node[:, None] != node))
        rank = torch.where(used, before.sum(1), len(node))[:, 1:]
        turn = elder.any(1) | ~used  # [B, N+1] not a first child
        top = (node * (under & turn[:, None])).amax(2)  # parents come first, so the greatest is the deepest
        return cls(rank.argsort(dim=1, stable=True) + 1, used, elder.int().argmax(2), top)


def rooted(values: Tensor, root: float) -> Tensor:
    """[B, N] for the draft's nodes -> [B, N+1] with a value for the root."""
    return torch.cat([torch.full_like(values[:, :1], root), values], dim=1)


def chances(draft: Draft) -> Tensor:
    """What the draft gave to its tokens [B, N], in float64."""
    if draft.q is None:
        return torch.ones_like(draft.tokens, dtype=torch.float64)
    return draft.q.gather(2, draft.tokens[..., None])[..., 0].double()


def descents(ratio: Tensor, parent: Tensor, walk: Walk) -> Tensor:
    """cap and slope [2, B, N+1] (float64) with P(n) = min(cap, slope P(top)) until something below is cut.

    Every step down is P -> min(1, P r), and such steps compose to one of this form; so all nodes that come
    into play with a younger sibling get their P in one operation. ratio and parent are [B, N+1].
    """
    row, node = (
        torch.arange(len(ratio), device=ratio.device),
        torch.arange(ratio.shape[1], device=ratio.device),
    )
    down = walk.top != node
    above, ratio = torch.where(down, parent, node), torch.where(down, ratio, 1.0)
    found = ratio.new_ones(2, *ratio.shape)
    for n in range(1, ratio.shape[1]):
        cap, slope = found[:, row, above[:, n]] * ratio[:, n]
        found[0, :, n] = cap.clamp(max=1.0)
        found[1, :, n] = slope.clamp(max=1e300)  # not inf, which times P = 0 is no number
    return found


def remainder(reach: Tensor, law: Tensor, q: Tensor | None, token: Tensor) -> tuple[Tensor, Tensor]:
    """P [B] and p [B, V] (float64) of a node once its first child, drawn from q (None: sure), is cut off.

    Where nothing is left, the node is either sure (P = 1: the draft's law was p itself) or out of reach.
    """
    rest = reach[:, None] * law
    rest = rest.scatter(1, token[:, None], 0.0) if q is None else (rest - q).clamp(min=0.0)
    mass = rest.sum(-1)
    left = (mass / (mass + 1 - reach)).nan_to_num(nan=1.0)
    return left, torch.where(mass[:, None] > 0, rest / mass[:, None], law)
