"""Sampling is exact in law: 20,000 seeded runs of the whole loop against full enumeration of three tokens."""

import itertools

import pytest
import torch
from tiny import table_trunk, tiny_network

from decoding import Sampling, generate
from decoding.sampling import RowSampling, law
from mtp import Network
from mtp.checkpoint import build_head

RUNS = 20_000
SETTINGS = Sampling(temperature=0.8, top_k=5, top_p=0.93)


@torch.no_grad()
def enumerated(network: Network, prompt: list[int], sampling: Sampling, length: int = 3) -> torch.Tensor:
    """The law of the next `length` tokens [V, V, V], from one trunk pass over every prefix."""
    size = network.trunk.vocab_size
    prefixes = list(itertools.product(range(size), repeat=length - 1))
    rows = torch.tensor([prompt + list(prefix) for prefix in prefixes])
    logits = network.trunk(rows).logits[:, len(prompt) - 1 :]
    steps = law(logits, RowSampling.stack([sampling] * len(rows), size, rows.device)).double()
    joint = steps[:, length - 1]
    for depth in range(length - 1):
        token = rows[:, len(prompt) + depth]
        joint = joint * steps[torch.arange(len(rows)), depth, token][:, None]
    return joint.reshape([size] * length)


def check_law(network: Network, prompt: list[int], sampling: Sampling = SETTINGS, **options) -> float:
    """Decode RUNS times, compare the first three tokens' frequencies with enumeration; returns alpha."""
    expected = enumerated(network, prompt, sampling).flatten() * RUNS
    out = generate(network, [prompt] * RUNS, sampling=sampling, max_new_tokens=4, **options)
    size = network.trunk.vocab_size
    cells = torch.tensor([(c.token_ids[0] * size + c.token_ids[1]) * size + c.token_ids[2] for c in out])
    observed = torch.bincount(cells, minlength=len(expected)).double()
    assert observed[expected == 0].sum() == 0, "a token of probability zero was emitted"
    chi_square_agrees(observed, expected)
    tested = sum(c.acceptance.tested for c in out)
    return sum(c.acceptance.accepted for c in out) / tested if tested else 0.0


def chi_square_agrees(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's statistic, cells below 5 pooled, within 4 standard deviations of its mean."""
    large = expected >= 5
    o = torch.cat([observed[large], observed[~large].sum()[None]])
    e = torch.cat([expected[large], expected[~large].sum()[None]])
    o, e = o[e > 0], e[e > 0]
    freedom = len(e) - 1
    statistic = float(((o - e) ** 2 / e).sum())
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 4, (
        f"chi-square {statistic:.0f} at {freedom} degrees"
    )


def blended(trunk, kind: str, good: torch.nn.Module, bad: torch.nn.Module, share: float) -> Network:
    """A head whose weights lie between a good and a bad one's."""
    with torch.no_grad():
        for ours, theirs in zip(good.parameters(), bad.parameters(), strict=True):
            ours.mul_(1 - share).add_(share * theirs)
    return Network(trunk, {kind: good}).eval()


@torch.no_grad()
def table_network(kind: str, share: float) -> Network:
    """Heads that know the table: perfect at share 0, random at share 1.

    A sequential module sees the token before its target, and its law is that token's row. A parallel head
    does not see it, so its table's rows are all alike.
    """
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(6, 6, generator=generator)
    if kind == "parallel":
        table = table[:1].repeat(6, 1)
    trunk = table_trunk(table)
    torch.manual_seed(7)
    good, bad = build_head(kind, trunk, depth=3), build_head(kind, trunk, depth=3)
    for parameter in bad.parameters():
        parameter.copy_(torch.randn_like(parameter))
    for name, parameter in good.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        if name.endswith("eh_proj.weight"):
            parameter.copy_(torch.cat([torch.eye(6), torch.zeros(6, 6)], dim=1))
    return blended(trunk, kind, good, bad, share)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("kind", ["sequential", "parallel"])
@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.999, 1.0), (0.3, 0.4, 0.97), (1.0, 0.1, 0.9)])
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


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize(("scale", "low", "high"), [(0.0, 0.999, 1.0), (0.2, 0.5, 0.99), (3.0, 0.05, 0.9)])
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
