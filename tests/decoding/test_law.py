"""Sampling is exact in law: thousands of seeded runs of the whole loop against three tokens' enumeration."""

import pytest
import torch
from laws import check_law, table_network
from tiny import tiny_network

from decoding import Sampling, generate
from mtp import Network


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
@pytest.mark.parametrize(
    ("share", "verifier", "low", "high"),
    [
        (0.0, "token", 0.999, 1.0),
        (0.3, "token", 0.4, 0.97),
        (0.3, "block", 0.4, 0.97),
        (1.0, "token", 0.1, 0.9),
    ],
)
def test_heads_good_half_bad_and_bad_keep_the_law(kind, share, low, high, verifier):
    alpha = check_law(table_network(kind, share), [1, 2], drafter=kind, num_draft_tokens=3, verifier=verifier)
    assert low <= alpha <= high


@torch.no_grad()
def exit_network(scale: float) -> Network:
    """scale 0: the layers above the exit add nothing, so the exit is perfect."""
    network = tiny_network(seed=3, vocab_size=6, layers=3)
    for layer in network.trunk.layers[1:]:
        layer.self_attn.o_proj.weight.mul_(scale)
        layer.mlp.down_proj.weight.mul_(scale)
    return network


@pytest.mark.parametrize(
    ("scale", "verifier", "low", "high"),
    [
        (0.0, "token", 0.999, 1.0),
        (0.2, "block", 0.5, 0.99),
        (3.0, "token", 0.05, 0.9),
    ],
)
def test_exits_good_half_bad_and_bad_keep_the_law(scale, low, high, verifier):
    alpha = check_law(
        exit_network(scale), [1, 2], drafter="early_exit", num_draft_tokens=3, verifier=verifier
    )
    assert low <= alpha <= high


@pytest.mark.parametrize("drafter", ["none", "sequential", "parallel"])
def test_a_law_that_depends_on_the_whole_text_is_kept(drafter):
    check_law(tiny_network(seed=2, vocab_size=6, layers=2), [1, 2, 3], drafter=drafter, num_draft_tokens=3)


@pytest.mark.parametrize("prompt", [[1, 2, 1, 2, 1], [0, 1, 2, 3, 4, 5, 0]])
def test_lookup_keeps_the_law(prompt):
    check_law(tiny_network(seed=2, vocab_size=6, layers=2), prompt, drafter="ngram", num_draft_tokens=3)


def test_rows_of_one_batch_keep_their_own_temperature():
    network = table_network("sequential", 0.3)
    samplings = [Sampling(temperature=1.0), Sampling()] * 50
    out = generate(
        network,
        [[1, 2]] * 100,
        drafter="sequential",
        num_draft_tokens=3,
        sampling=samplings,
        max_new_tokens=8,
    )
    greedy = generate(network, [1, 2], max_new_tokens=8)[0].token_ids
    assert all(c.token_ids == greedy for c in out[1::2])
    assert len({tuple(c.token_ids) for c in out[::2]}) > 40


def test_a_seed_repeats_in_any_company():
    network = table_network("sequential", 0.3)
    options = {"drafter": "sequential", "sampling": Sampling(temperature=1.0), "max_new_tokens": 12}
    prompts = [[1, 2], [3], [4, 5, 0]]
    together = generate(network, prompts, seed=[1, 7, 2], **options)
    swapped = generate(network, prompts[::-1], seed=[2, 7, 1], **options)
    assert [c.token_ids for c in together] == [c.token_ids for c in swapped[::-1]]
    for prompt, seed, row in zip(prompts, [1, 7, 2], together, strict=True):
        assert generate(network, prompt, seed=seed, **options)[0].token_ids == row.token_ids
