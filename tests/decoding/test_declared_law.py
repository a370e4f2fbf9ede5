"""Every drafter draws its tokens from the law that it declares: one proposal, drawn again 5,000 times.

A wrong q keeps greedy ids, looks good in acceptance and bends the law of the output; a test of the output
sees it only where the verifier happens to reject enough. Here the drawn tokens themselves are counted.
Shapes: B rows, N draft nodes, V vocabulary.
"""

import dataclasses
import importlib
import inspect

import pytest
import torch
from drafters import drafter_for
from tiny import tiny_network
from torch.nn.functional import one_hot

from decoding import Sampling
from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.generate import drafter_names
from decoding.sampling import RowSampling
from decoding.tree import ancestors

SAMPLING = Sampling(temperature=0.8, top_k=5, top_p=0.93)
PROMPTS = [[3, 1, 4, 1], [2, 0, 2, 0]]  # the last token stood before, the last two stood before
RUNS = 5_000


@torch.inference_mode()
def proposed(network, drafter):
    """One draft [B, N] for RUNS seeds of every prompt, by prompt."""
    text = torch.tensor(PROMPTS).repeat_interleave(RUNS, 0)
    cache = KVCache(len(text), network.trunk.device, capacity=8)
    drafter.reset(len(text), cache)
    window = cache.open(text.shape[1] - 1)
    out = network.trunk(
        text[:, :-1], positions=window.positions, mask=window.mask, cache=cache, taps=drafter.taps
    )
    keep = torch.ones(len(text), text.shape[1] - 1, dtype=torch.bool)
    cache.commit(keep)
    drafter.extend(text[:, :-1], out.states, keep)
    rows = RowSampling.stack([SAMPLING] * len(text), network.trunk.vocab_size, text.device)
    context = StepContext(rows, torch.arange(len(text)), [9] * len(text), 0, 3)
    return drafter.propose(text[:, -1], 3, context)


def check_declared(draft, size):
    """Given its ancestors and earlier siblings every node's token follows its declared law."""
    prompt = torch.arange(len(draft.tokens)) // RUNS
    for rows in draft.parents.split(RUNS):
        assert (rows == rows[0]).all(), "the shape of a draft depends on what was drawn"
    for node in range(draft.tokens.shape[1]):
        used = draft.parents[:, node] >= 0
        tokens = draft.tokens[used, node]
        q = one_hot(tokens, size).double() if draft.q is None else draft.q[used, node].double()
        if len(tokens):
            check_node(known(draft, node, prompt)[used], tokens, q)


def known(draft, node, prompt):
    """A number [B] for all that the law of `node` may depend on: the prompt, ancestors, earlier siblings."""
    parents, key = draft.parents, prompt
    above = ancestors(parents)[:, node + 1]  # [B, N+1]
    for other in range(node):
        matters = above[:, other + 1] | (parents[:, other] == parents[:, node])
        key = key * 7 + torch.where(matters, draft.tokens[:, other] + 1, 0)
    return key


def check_node(key, tokens, q):
    """Chi-square over all groups of equal `key` at once; cells below 5 are pooled.

    The statistic's mean is exact: n q (1 - q) is the variance of a cell, n q its expectation.
    """
    _, group, members = key.unique(return_inverse=True, return_counts=True)
    laws = torch.zeros(len(members), q.shape[1]).double().index_add_(0, group, q) / members[:, None]
    torch.testing.assert_close(q.sum(1), torch.ones(len(q)).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(q, laws[group], atol=1e-5, rtol=0)
    drawn = torch.bincount(group * q.shape[1] + tokens, minlength=laws.numel()).reshape(laws.shape).double()
    expected = members[:, None] * laws
    assert drawn[expected == 0].sum() == 0, "a token of probability zero was drafted"
    large = expected >= 5
    statistic = (((drawn - expected) ** 2) / expected)[large].sum()
    mean = (1 - laws)[large].sum()
    rest = torch.where(large, 0.0, laws).sum(1)  # share of each group's small cells
    if (pooled := (members * rest).sum()) > 1:
        statistic += (drawn[~large].sum() - pooled) ** 2 / pooled
        mean += (members * rest * (1 - rest)).sum() / pooled
    assert statistic - mean <= 4.5 * (2 * mean) ** 0.5, f"chi-square {statistic:.0f} instead of {mean:.0f}"


def branches(name):
    """Whether the drafter can draft a tree."""
    return (
        "widths" in inspect.signature(importlib.import_module(f"decoding.drafters.{name}").build).parameters
    )


@pytest.fixture(scope="module")
def six():
    return tiny_network(seed=2, vocab_size=6, layers=2)


@pytest.fixture(scope="module")
def sequential(six):
    return proposed(six, drafter_for(six, "sequential"))


@pytest.mark.parametrize("name", drafter_names())
def test_tokens_are_drawn_from_the_declared_law(six, name):
    draft = proposed(six, drafter_for(six, name))
    assert name == "none" or draft.tokens.shape[1] >= 1
    check_declared(draft, 6)
    if name == "hybrid":  # rows that look up declare a point mass beside rows that draw
        assert draft.q[:RUNS].amax(-1).min() < 0.9
        assert torch.equal(draft.q[RUNS:], one_hot(draft.tokens[RUNS:], 6).float())


@pytest.mark.parametrize("name", filter(branches, drafter_names()))
def test_siblings_are_drawn_from_the_declared_law(six, name):
    draft = proposed(six, drafter_for(six, name, widths=[3, 2]))
    assert draft.tokens.shape[1] >= 5
    check_declared(draft, 6)


@pytest.mark.parametrize(
    "lie",
    [
        lambda draft: {"q": None},
        lambda draft: {"q": draft.q.sqrt() / draft.q.sqrt().sum(-1, keepdim=True)},
        lambda draft: {"q": (draft.q + 0.01) / 1.06},
        lambda draft: {"q": draft.q.roll(1, dims=1)},
        lambda draft: {"tokens": draft.q.argmax(-1)},
        lambda draft: {"tokens": torch.where(draft.q.gather(2, draft.tokens[..., None])[..., 0] < 0.25,
                                             draft.q.argmax(-1), draft.tokens)},
    ],
    ids=["none", "temperature", "smoothed", "shifted", "argmax", "picky"],
)  # fmt: skip
def test_a_lie_is_found(sequential, lie):
    with pytest.raises(AssertionError):
        check_declared(dataclasses.replace(sequential, **lie(sequential)), 6)
