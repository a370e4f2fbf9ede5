"""How surely a draft reaches each of its depths, given its tokens: what acceptance is estimated from.

A draft of one step is accepted as far as depth k or not: one bit. Its tokens, p and q determine the chance of
that, which says more, and says it of every depth drafted, also of those behind the first rejection. Shapes: B
rows, N draft nodes in a chain, V vocabulary.
"""

import torch
from torch import Tensor

from decoding.draft import Draft


def ratios(p: Tensor, draft: Draft) -> Tensor:
    """p(x)/q(x) [B, N] of a chain's tokens, from p [B, N+1, V]; q None is a point mass."""
    at = draft.tokens[..., None]
    p_x = p[:, :-1].gather(2, at)[..., 0].double()
    return p_x if draft.q is None else p_x / draft.q.gather(2, at)[..., 0]


def reach_token(p: Tensor, draft: Draft) -> Tensor:
    """[B, N]: token by token the draft is accepted as far as depth k with probability Π min(1, p/q)."""
    return ratios(p, draft).nan_to_num(nan=0.0).clamp(max=1.0).cumprod(1)


def reach_block(p: Tensor, draft: Draft) -> Tensor:
    """[B, N]: the same for block verification, P_k = min(1, P_{k-1} p/q), so that E[accepted] = Σ E[P_k]
    (2403.10444)."""
    reach = [torch.ones_like(draft.tokens[:, :1], dtype=torch.float64)]
    for ratio in ratios(p, draft).nan_to_num(nan=0.0).split(1, dim=1):
        reach.append((reach[-1] * ratio).clamp(max=1.0))
    return torch.cat(reach[1:] or [reach[0][:, :0]], dim=1)


def counted(tested: int, accepted: int) -> list[float]:
    """What came of a step, as chances: depths 1 ... accepted were reached, one more was if tested not.

    >>> counted(3, 2), counted(2, 2), counted(0, 0)
    ([1.0, 1.0, 0.0], [1.0, 1.0], [])
    """
    return [1.0] * accepted + [0.0] * (tested - accepted)
