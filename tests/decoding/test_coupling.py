"""Coupled sampling: one text for a seed, whatever drafts it, however far, in whatever batch; and the right
law."""

import pytest
import torch
from drafters import drafter_for

from decoding import Sampling, generate
from decoding.coupling import coupled_choice
from decoding.generate import drafter_names

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [7, 8, 9, 7, 8, 9, 7, 8]]
OPTIONS = {
    "verifier": "coupled",
    "sampling": Sampling(temperature=1.0),
    "max_new_tokens": 30,
    "seed": [3, 1, 4, 1],
}


@pytest.fixture(scope="module")
def plain(network):
    return [out.token_ids for out in generate(network, PROMPTS, **OPTIONS)]


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 7])
def test_the_text_of_a_seed_is_the_same_whatever_drafts_it(network, plain, drafter, num_draft_tokens):
    out = generate(
        network, PROMPTS, drafter=drafter_for(network, drafter), num_draft_tokens=num_draft_tokens, **OPTIONS
    )
    assert [row.token_ids for row in out] == plain


def test_a_row_is_the_same_alone(network, plain):
    for prompt, seed, tokens in zip(PROMPTS, OPTIONS["seed"], plain, strict=True):
        alone = generate(network, prompt, drafter="sequential", **OPTIONS | {"seed": seed})
        assert alone[0].token_ids == tokens


def test_seeds_differ(network):
    texts = {tuple(generate(network, PROMPTS[0], **OPTIONS | {"seed": s})[0].token_ids) for s in range(10)}
    assert len(texts) == 10


def test_tokens_follow_the_law():
    law = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64).expand(50_000, 4)
    picked = coupled_choice(law, torch.arange(50_000), torch.full((50_000,), 17))
    frequency = torch.bincount(picked, minlength=4) / 50_000
    assert (frequency - law[0]).abs().max() < 0.01
    assert frequency[3] == 0


def test_positions_do_not_share_noise():
    law = torch.full((20_000, 4), 0.25, dtype=torch.float64)
    seeds = torch.arange(20_000)
    here, there = (coupled_choice(law, seeds, torch.full_like(seeds, at)) for at in (5, 6))
    assert abs((here == there).double().mean() - 0.25) < 0.015


def test_acceptance_lies_between_its_bounds():
    """Two laws, one noise: equal picks with probability between (1-TV)/(1+TV) and 1-TV (design, rule 8)."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
    seeds = torch.arange(50_000)
    at = torch.zeros_like(seeds)
    same = coupled_choice(p.expand(50_000, 3), seeds, at) == coupled_choice(q.expand(50_000, 3), seeds, at)
    rate = same.double().mean()
    expected = sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(3)) for x in range(3))
    assert abs(rate - expected) < 0.01
    distance = (p - q).abs().sum() / 2
    assert (1 - distance) / (1 + distance) - 0.01 < rate < 1 - distance + 0.01
