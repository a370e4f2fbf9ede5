"""Distances of laws against sums over the vocabulary, and losses over whole drafts against enumeration."""

import itertools

import pytest
import torch

from training.distances import (
    forward_kl,
    hybrid,
    log_alpha,
    ratio,
    rejected_by,
    rejected_on_text,
    reverse_kl,
    total_variation,
)

V = 5


def laws(count: int = 6, seed: int = 0, size: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(2, count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_p, log_q = (2 * logits).log_softmax(-1)
    return log_p, log_q


def test_every_distance_is_its_sum_over_the_vocabulary():
    log_p, log_q = laws()
    for n in range(len(log_p)):
        p, q = log_p[n].exp().tolist(), log_q[n].exp().tolist()
        pairs = list(zip(p, q, strict=True))
        ln = lambda x: torch.tensor(x, dtype=torch.float64).log().item()  # noqa: E731
        alpha = sum(min(a, b) for a, b in pairs)
        kl = sum(a * (ln(a) - ln(b)) for a, b in pairs)
        weight = 2.718281828459045 ** (-3 * alpha)
        assert log_alpha(log_p, log_q)[n].exp().item() == pytest.approx(alpha)
        assert total_variation(log_p, log_q)[n].item() == pytest.approx(sum(abs(a - b) for a, b in pairs) / 2)
        assert forward_kl(log_p, log_q)[n].item() == pytest.approx(kl)
        assert reverse_kl(log_p, log_q)[n].item() == pytest.approx(sum(b * (ln(b) - ln(a)) for a, b in pairs))
        assert hybrid(log_p, log_q, 3.0)[n].item() == pytest.approx(weight * kl + (1 - weight) * (1 - alpha))


@pytest.mark.parametrize("distance", [forward_kl, reverse_kl, total_variation, log_alpha])
def test_gradients_agree_with_finite_differences(distance):
    log_p, log_q = laws(3)
    logits = log_q.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distance(log_p, x.log_softmax(-1)), logits)


def test_a_law_equal_to_the_targets_costs_nothing():
    log_p, _ = laws()
    for distance in (forward_kl, reverse_kl, total_variation, log_alpha):
        assert distance(log_p, log_p).abs().max() < 1e-12


def test_the_gradient_of_minus_log_alpha_is_that_of_tv_divided_by_alpha():
    log_p, log_q = laws()
    logits = log_q.clone().requires_grad_()
    alpha = log_alpha(log_p, log_q).exp()
    (of_tv,) = torch.autograd.grad(total_variation(log_p, logits.log_softmax(-1)).sum(), logits)
    (of_lk,) = torch.autograd.grad(-log_alpha(log_p, logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(of_lk, of_tv / alpha[:, None])


def test_the_hybrids_weight_is_a_constant():
    log_p, log_q = laws()
    logits = log_q.clone().requires_grad_()
    weight = (-3 * log_alpha(log_p, log_q).exp())[:, None].exp()
    grads = [
        torch.autograd.grad(d(log_p, logits.log_softmax(-1)).sum(), logits)[0]
        for d in (lambda p, q: hybrid(p, q, 3.0), forward_kl, total_variation)
    ]
    torch.testing.assert_close(grads[0], weight * grads[1] + (1 - weight) * grads[2])


def test_laws_that_hardly_overlap_still_have_a_finite_gradient():
    log_p = torch.tensor([[200.0, 0.0]]).log_softmax(-1)
    logits = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss = -log_alpha(log_p, logits.log_softmax(-1)).sum()
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad.any()


def test_over_text_drawn_from_the_target_the_ratio_is_alpha_in_the_mean():
    log_p, log_q = laws()
    mean = sum(log_p[:, x].exp() * ratio(log_p[:, x], log_q[:, x]) for x in range(V))
    torch.testing.assert_close(mean, log_alpha(log_p, log_q).exp())


def test_the_loss_on_text_has_the_true_chance_of_rejection_as_its_mean():
    """A chain of two: p_2 and q_2 depend on the first token. Enumerated over all texts, and over all drafts
    with their verdicts, the chance that both drafted tokens are accepted is the same number."""
    log_p, log_q = laws(1 + V)
    everywhere = torch.ones(2, 1, dtype=torch.bool)
    of_text = torch.zeros(2, dtype=torch.float64)
    overlap = log_alpha(log_p, log_q).exp()
    for x in range(V):
        alpha = torch.stack([overlap[0], overlap[1 + x]])[:, None]
        accepted = torch.stack([ratio(log_p[0, x], log_q[0, x]), torch.zeros(())])[:, None].double()
        of_text += log_p[0, x].exp() * rejected_on_text(alpha, accepted, everywhere)[:, 0]
    p, q = log_p.exp(), log_q.exp()
    both = 0.0
    for x, y in itertools.product(range(V), repeat=2):  # drafts drawn from q, each accepted with min(1, p/q)
        first = q[0, x] * min(1.0, float(p[0, x] / q[0, x]))
        both += first * q[1 + x, y] * min(1.0, float(p[1 + x, y] / q[1 + x, y]))
    assert of_text[0].item() == pytest.approx(1 - overlap[0].item())
    assert of_text[1].item() == pytest.approx(1 - float(both))


def test_the_end_to_end_total_variation_is_the_papers_formula():
    alpha = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    found = rejected_by(alpha, torch.ones(4, 3, dtype=torch.bool)).mean(0)
    for n in range(3):
        products = [alpha[: j + 1, n].prod() for j in range(4)]
        assert found[n].item() == pytest.approx(1 - sum(products).item() / 4, rel=1e-6)


@pytest.mark.parametrize("kind", ["tv_chain", "accept"])
def test_a_draft_that_leaves_its_text_costs_nothing_behind(kind):
    alpha = torch.tensor([[0.5], [0.5], [0.5]])
    counted = torch.tensor([[True], [False], [True]])  # the third depth is behind one that does not exist
    found = rejected_by(alpha, counted) if kind == "tv_chain" else rejected_on_text(alpha, alpha, counted)
    assert found[:, 0].tolist() == [0.5, 0, 0]
