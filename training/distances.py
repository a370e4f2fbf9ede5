"""How far a draft's law q lies from the target's law p: at one position, and along a whole draft.

Laws are log-probabilities [N, R] of the tokens that may be drafted. p is the trunk's over its whole
vocabulary, so over R < V tokens it adds up to less than 1, and is not scaled up: what a head cannot draft is
lost, and every formula here counts it as lost. Letters: N positions, R tokens, D depths.
"""

import torch
from torch import Tensor


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p | q) = sum_v p (log p - log q): [N]; the gradient of the cross-entropy with the law p."""
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q | p) = sum_v q (log q - log p): [N]."""
    return forward_kl(log_q, log_p)


def log_alpha(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log of the chance sum_v min(p_v, q_v) that a token drawn from q is accepted: [N].

    In logarithms throughout, so that laws which hardly overlap still have a gradient.
    """
    return torch.minimum(log_p, log_q).logsumexp(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - alpha = half of sum_v |p_v - q_v|: [N]."""
    return 1 - log_alpha(log_p, log_q).exp()


def hybrid(log_p: Tensor, log_q: Tensor, eta: float) -> Tensor:
    """w KL(p | q) + (1 - w) TV with w = exp(-eta alpha), alpha taken as a constant: [N] (arXiv 2602.23881).

    Far from p the gradient is KL's, which is large there; the nearer, the more it is TV's. alpha is that of
    the position itself.
    """
    overlap = log_alpha(log_p, log_q)
    weight = (-eta * overlap.detach().exp()).exp()
    return weight * forward_kl(log_p, log_q) + (1 - weight) * (1 - overlap.exp())


def ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """min(1, q(x) / p(x)) of one token x, log-probabilities and result [N]: over x drawn from p its mean is
    alpha."""
    return (log_q - log_p).clamp(max=0).exp()


def rejected_by(alpha: Tensor, counted: Tensor) -> Tensor:
    """Chance that a draft has ended by each depth, 1 - prod_{m<=j} alpha_m: [D, N]; 0 where not counted.

    Its weighted sum over j is the end-to-end total variation 1 - (1/D) sum_j prod_{m<=j} (1 - TV_m) (arXiv
    2606.12370). alpha and counted [D, N]; a depth is counted only behind counted ones.

    >>> alpha, all_ = torch.tensor([[0.5], [0.5]]), torch.ones(2, 1, dtype=torch.bool)
    >>> rejected_by(alpha, all_).tolist()
    [[0.5], [0.75]]
    """
    return (1 - alpha.cumprod(0)) * counted.cumprod(0)


def rejected_on_text(alpha: Tensor, accepted: Tensor, counted: Tensor) -> Tensor:
    """1 - prod_{m<j} accepted_m * alpha_j at each depth: [D, N]; 0 where not counted.

    accepted_m = min(1, q_m(x_m) / p_m(x_m)) for the text's own token. If the text was drawn from the target,
    the mean is exactly the chance that token j of a draft is not accepted: `rejected_by` multiplies means
    where this is the mean of products.

    >>> alpha, all_ = torch.tensor([[0.5], [0.5]]), torch.ones(2, 1, dtype=torch.bool)
    >>> rejected_on_text(alpha, torch.tensor([[0.2], [0.3]]), all_).tolist()
    [[0.5], [0.8999999761581421]]
    """
    reached = torch.cat([torch.ones_like(alpha[:1]), accepted[:-1]]).cumprod(0)
    return (1 - reached * alpha) * counted.cumprod(0)
