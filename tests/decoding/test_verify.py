"""Verifiers against exact enumeration: integrated over their uniforms, the emitted tokens follow the target's
law."""

import itertools

import pytest
import torch

from decoding import Draft, verify_block, verify_token
from decoding.noise import uniforms

V = 3


def random_laws(generator, *shape):
    return torch.rand(*shape, V, generator=generator, dtype=torch.float64).pow(2).softmax(-1)


def simulated(verify, p_of, q_of, length, runs, seed):
    """Joint frequencies of the first `length` + 1 tokens when every step drafts `length` tokens from q."""
    shape = [runs]
    u = uniforms(torch.arange(runs) + seed, 0, 1, length + 1)
    tokens, q = [], []
    for depth in range(length):
        path = tuple(tokens)
        law = q_of(path, shape)
        q.append(law)
        mass = law.cumsum(-1)
        tokens.append((u[:, depth, None] >= mass).sum(-1).clamp(max=V - 1))
    drafted = torch.stack(tokens, 1)
    p = torch.stack([p_of(tuple(tokens[:depth]), shape) for depth in range(length + 1)], 1)
    parents = torch.arange(length).expand(runs, -1)
    verdict = verify(
        p, Draft(drafted, parents, torch.stack(q, 1)), uniforms(torch.arange(runs) + seed, 0, 2, length + 1)
    )
    return drafted, verdict


class Models:
    """Random history-dependent laws p and q over V tokens."""

    def __init__(self, seed, length):
        g = torch.Generator().manual_seed(seed)
        self.p = {n: random_laws(g, *[V] * n) for n in range(2 * length + 2)}
        self.q = {n: random_laws(g, *[V] * n) for n in range(length + 1)}

    def law(self, table, path, shape):
        rows = table[len(path)]
        return rows[path] if path else rows.expand(*shape, -1)


@pytest.mark.parametrize("verify", [verify_token, verify_block])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_first_tokens_follow_p(verify, seed):
    """Emitted prefix, completed from p where it is short, against the enumerated law of three tokens."""
    length, runs = 2, 200_000
    models = Models(seed, length)
    drafted, verdict = simulated(
        verify,
        lambda path, shape: models.law(models.p, path, shape),
        lambda path, shape: models.law(models.q, path, shape),
        length,
        runs,
        seed * runs,
    )
    count = verdict.accepted.sum(1) - 1
    line = torch.cat([drafted, torch.zeros(runs, 1, dtype=torch.long)], 1)
    line[torch.arange(runs), count] = verdict.next_token
    observed = torch.zeros(V, V, V, dtype=torch.float64)
    for emitted in range(length + 1):
        rows = line[count == emitted]
        head = rows[:, : emitted + 1]
        for tail in itertools.product(range(V), repeat=length - emitted):
            weight = torch.ones(len(rows), dtype=torch.float64)
            path = [head[:, i] for i in range(emitted + 1)]
            for token in tail:
                weight = weight * models.p[len(path)][tuple(path)][:, token]
                path.append(torch.full((len(rows),), token))
            observed.index_put_(tuple(path), weight, accumulate=True)
    expected = models.p[0][:, None, None] * models.p[1][:, :, None] * models.p[2]
    error = (observed / runs - expected).abs()
    assert (error < 5 * (expected / runs).sqrt()).all()


def test_case_11_residual_is_the_clipped_difference_divided_by_its_sum():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(20_000, 2, 4)
    q = torch.tensor([0.1, 0.6, 0.2, 0.1]).expand(20_000, 1, 4)
    u = uniforms(torch.arange(20_000), 0, 1, 1)
    drafted = (u >= q[:, 0].cumsum(-1)).sum(-1, keepdim=True).clamp(max=3)
    verdict = verify_token(
        p, Draft(drafted, torch.zeros_like(drafted), q), uniforms(torch.arange(20_000), 0, 2, 2)
    )
    taken = verdict.accepted[:, 1]
    first = torch.where(taken, drafted[:, 0], verdict.next_token)
    assert abs(taken.float().mean() - 0.6) < 0.015
    frequency = torch.bincount(first, minlength=4) / 20_000
    assert (frequency - p[0, 0]).abs().max() < 0.015
    assert frequency[3] == 0


@pytest.mark.parametrize("verify", [verify_token, verify_block])
def test_case_12_a_sure_draft_is_accepted_with_its_target_probability(verify):
    p = torch.tensor([0.2, 0.5, 0.3]).expand(20_000, 2, 3)
    draft = Draft(torch.zeros(20_000, 1, dtype=torch.long), torch.zeros(20_000, 1, dtype=torch.long))
    verdict = verify(p, draft, uniforms(torch.arange(20_000), 0, 2, 2))
    taken = verdict.accepted[:, 1]
    first = torch.where(taken, 0, verdict.next_token)
    assert abs(taken.float().mean() - 0.2) < 0.015
    assert (torch.bincount(first, minlength=3) / 20_000 - p[0, 0]).abs().max() < 0.015


@pytest.mark.parametrize("verify", [verify_token, verify_block])
def test_equal_laws_accept_everything(verify):
    g = torch.Generator().manual_seed(0)
    p = random_laws(g, 500, 4)
    drafted = torch.multinomial(p[:, :3].reshape(-1, V), 1, generator=g).reshape(500, 3)
    draft = Draft(drafted, torch.arange(3).expand(500, -1), p[:, :3])
    assert verify(p, draft, uniforms(torch.arange(500), 0, 2, 4)).accepted.all()


def test_block_accepts_the_paper_toys_eleven_ninths():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 accepted by block, 10/9 token by token
    (2403.10444)."""
    runs = 200_000
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(runs, 3, 2)
    q = p.flip(-1)[:, :2]
    u = uniforms(torch.arange(runs), 0, 1, 2)
    drafted = (u >= 2 / 3).long()
    draft = Draft(drafted, torch.arange(2).expand(runs, -1), q)
    noise = uniforms(torch.arange(runs), 0, 2, 3)
    means = [
        (verify(p, draft, noise).accepted.sum(1) - 1.0).mean() for verify in (verify_block, verify_token)
    ]
    assert abs(means[0] - 11 / 9) < 0.01
    assert abs(means[1] - 10 / 9) < 0.01


def test_siblings_are_tested_in_turn_and_the_rest_is_the_residual():
    """Two different sure children of the root: p0 first, then p1 of what is left, then what neither took."""
    runs = 50_000
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).expand(runs, 3, 3)
    draft = Draft(torch.tensor([[0, 1]]).expand(runs, -1), torch.zeros(runs, 2, dtype=torch.long))
    verdict = verify_token(p, draft, uniforms(torch.arange(runs), 0, 2, 3))
    rates = verdict.accepted.double().mean(0)
    assert abs(rates[1] - 0.2) < 0.01
    assert abs(rates[2] - 0.3) < 0.01
    rejected = ~verdict.accepted[:, 1:].any(1)
    assert (verdict.next_token[rejected] == 2).all()


def test_unused_nodes_are_never_accepted():
    p = torch.full((4, 3, V), 1 / V)
    draft = Draft(torch.zeros(4, 2, dtype=torch.long), torch.full((4, 2), -1))
    for verify in (verify_token, verify_block):
        verdict = verify(p, draft, torch.zeros(4, 3, dtype=torch.float64))
        assert verdict.accepted.tolist() == [[True, False, False]] * 4
