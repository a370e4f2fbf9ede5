"""The lossless accept / reject walk: whatever is drafted, the emitted tokens follow the target's law.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import torch
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.sampling import draw
from decoding.tree import is_chain


def verify_token(p: Tensor, draft: Draft, u: Tensor) -> Verdict:
    """Token-level rejection sampling (Leviathan et al. 2211.17192, Algorithm 1), walked down the draft tree.

    p [B, N+1, V] is the target's law after root and nodes; u [B, N+1] in [0, 1): column n-1 tests node n, the
    last draws the next token. A node is tested when its parent was the last one accepted: accepted with
    probability min(1, p(x)/q(x)), otherwise p becomes norm(max(p - q, 0)) there and the next sibling is
    tested against that. What is left of p at the last accepted node is the law of the next token, bonus or
    recovered alike.
    """
    if not p.is_cuda and is_chain(draft.parents):  # elsewhere the question would wait for the device
        return walk_chain(p, draft, u)
    return walk_tree(p, draft, u)


def walk_tree(p: Tensor, draft: Draft, u: Tensor) -> Verdict:
    """verify_token on any tree, one node after the other."""
    node = torch.zeros(len(p), dtype=torch.long, device=p.device)  # last accepted
    accepted = torch.zeros(p.shape[:2], dtype=torch.bool, device=p.device)
    accepted[:, 0] = True
    left = p[:, 0]
    for n in range(1, p.shape[1]):
        token = draft.tokens[:, n - 1, None]  # [B, 1]
        q = None if draft.q is None else draft.q[:, n - 1]
        tested = draft.parents[:, n - 1] == node
        taken = tested & (u[:, n - 1] * probability(q, token) < left.gather(1, token)[:, 0])
        remaining = torch.where(tested[:, None], residual(left, q, token), left)
        left = torch.where(taken[:, None], p[:, n], remaining)
        node = torch.where(taken, n, node)
        accepted[:, n] = taken
    return Verdict(accepted, draw(left, u[:, -1]))


def walk_chain(p: Tensor, draft: Draft, u: Tensor) -> Verdict:
    """verify_token on chains, all nodes at once: the accepted ones are those before the first that fails."""
    used, count = draft.parents >= 0, draft.tokens.shape[1]  # [B, N], N
    if count == 0:
        return Verdict(torch.ones_like(p[..., 0], dtype=torch.bool), draw(p[:, 0], u[:, -1]))
    at = draft.tokens[..., None]
    least = 1.0 if draft.q is None else draft.q.gather(2, at)[..., 0]
    taken = used & (u[:, :-1] * least < p[:, :-1].gather(2, at)[..., 0])
    last = taken.long().cumprod(1).sum(1)  # [B] the last accepted node
    row, failed = torch.arange(len(p), device=p.device), last.clamp(max=count - 1)  # column of the next node
    left = p[row, last]
    rest = residual(left, None if draft.q is None else draft.q[row, failed], draft.tokens[row, failed, None])
    tested = (last < count) & used[row, failed]
    left = torch.where(tested[:, None], rest, left)
    accepted = torch.arange(count + 1, device=p.device) <= last[:, None]
    return Verdict(accepted, draw(left, u[:, -1]))


def probability(q: Tensor | None, token: Tensor) -> Tensor | float:
    return 1.0 if q is None else q.gather(1, token)[:, 0]


def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """norm(max(p - q, 0)) [B, V]; q None is a point mass on token [B, 1].

    Where p and q agree to rounding nothing is left; such a draft is rejected with probability zero but for
    rounding, and p itself is the right law then.
    """
    rest = p.scatter(1, token, 0.0) if q is None else (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def verify_block(p: Tensor, draft: Draft, u: Tensor) -> Verdict:
    """Block verification of a chain (Sun et al. 2403.10444, Algorithm 2): never fewer accepted than token by
    token.

    With P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i)/q_i(x_i)), Z_i the mass of max(P_i p_{i+1} - q_{i+1}, 0) and
    h_i = Z_i / (Z_i + 1 - P_i), h_g = P_g, the longest prefix i with u_i < h_i is accepted; the next token
    follows norm(max(P_i p_{i+1} - q_{i+1}, 0)), or p_{g+1} after the whole draft. Arguments as in
    verify_token.
    """
    if draft.tokens.shape[1] == 0:
        return verify_token(p, draft, u)
    q = one_hot(draft.tokens, p) if draft.q is None else draft.q
    used = draft.parents >= 0  # [B, N]; a row's draft is a prefix of the chain
    at = draft.tokens[..., None]
    ratio = (p[:, :-1].gather(2, at) / q.gather(2, at))[..., 0].double()  # [B, N]
    reach = [torch.ones_like(ratio[:, 0])]
    for i in range(ratio.shape[1]):
        reach.append((reach[-1] * ratio[:, i]).clamp(max=1.0))
    prefix = torch.stack(reach, dim=1)  # [B, N+1]: P_0 ... P_N
    rest = (prefix[:, :-1, None] * p[:, :-1] - q * used[..., None]).clamp(min=0.0)  # [B, N, V]
    mass = rest.sum(-1)  # Z_0 ... Z_{N-1}
    length = used.sum(1, keepdim=True)
    chance = torch.cat([mass[:, 1:], torch.zeros_like(mass[:, :1])], dim=1)  # Z_1 ... Z_N
    inside = chance / (chance + 1 - prefix[:, 1:])
    step = torch.arange(1, p.shape[1], device=p.device)
    accept = torch.where(step == length, prefix[:, 1:], inside.nan_to_num(nan=1.0))
    taken = (u[:, :-1] < accept) & used
    count = (taken * step).amax(1)  # [B]: the longest accepted prefix
    row = torch.arange(len(p), device=p.device)
    law = torch.cat([rest, p[:, -1:]], dim=1)[row, count]
    whole = (count == length[:, 0]) | (law.sum(-1) <= 0)  # nothing left by rounding (p = q): draw from p
    law = torch.where(whole[:, None], p[row, count], law)
    accepted = torch.arange(p.shape[1], device=p.device) <= count[:, None]
    return Verdict(accepted, draw(law, u[:, -1]))


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """[B, N] -> [B, N, V] point masses in the dtype of `like` [..., V]."""
    zeros = torch.zeros(*tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return zeros.scatter_(-1, tokens[..., None], 1.0)


EPSILON, DELTA = 0.09, 0.3  # Medusa's generator defaults: delta = sqrt(epsilon)


def verify_typical(p: Tensor, draft: Draft, u: Tensor) -> Verdict:
    """Medusa's typical acceptance (arXiv 2401.10774): lossy. Arguments as in verify_token.

    A node is accepted when p(x) > min(epsilon, delta exp(-H(p))), the first such sibling being followed; the
    next token is drawn from p. The more uncertain the target, the less probable a draft may be.
    """
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)  # [B, N+1]
    least = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    row = torch.arange(len(p), device=p.device)
    node = torch.zeros_like(row)
    accepted = torch.zeros(p.shape[:2], dtype=torch.bool, device=p.device)
    accepted[:, 0] = True
    for n in range(1, p.shape[1]):
        tested = draft.parents[:, n - 1] == node
        taken = tested & (p[row, node, draft.tokens[:, n - 1]] > least[row, node])
        node = torch.where(taken, n, node)
        accepted[:, n] = taken
    return Verdict(accepted, draw(p[row, node], u[:, -1]))
