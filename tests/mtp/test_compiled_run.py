"""A run of compiled layers is one call that writes the cache itself: the same bits whatever runs beside."""

import copy
import shutil

import pytest
import torch
from architectures import LAYERS, trunk_of

from decoding import generate
from decoding.cache import KVCache
from mtp import Network
from mtp.compiled import CompiledLayer
from mtp.scoring import Scorer
from mtp.trunk import ARCHITECTURES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TOKENS = torch.tensor([[1, 5, 2, 2, 9, 7, 30, 4], [3, 3, 3, 1, 8, 63, 0, 6]])
LENGTHS = torch.tensor([[8], [3]])
TREE = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 3, -1]])
ALL = tuple(range(LAYERS + 1))
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request):
    """A trunk as it is and compiled."""
    plain = trunk_of(request.param)
    ours = copy.deepcopy(plain)
    assert Network(ours).compile_kernel() is None
    return plain, ours


def filled(trunk, rows=(0, 1)):
    """A cache with LENGTHS committed tokens of the rows asked for."""
    rows = list(rows)
    cache = KVCache(len(rows), torch.device("cpu"))
    window = cache.open(8)
    trunk(TOKENS[rows], positions=window.positions, mask=window.mask, cache=cache)
    cache.commit(torch.arange(8) < LENGTHS[rows])
    return cache


def score(trunk, cache, nodes, parents=None, **options):
    window = cache.open(nodes.shape[1], parents=parents)
    return trunk(nodes, positions=window.positions, mask=window.mask, cache=cache, taps=ALL, **options)


def same_bits(one, other):
    assert one.states.keys() == other.states.keys()
    assert all(torch.equal(one.states[tap], other.states[tap]) for tap in one.states)
    assert torch.equal(one.logits, other.logits)


def of_row(out, row, count):
    """The first `count` nodes of a row."""
    part = copy.copy(out.states)
    states = {tap: state[row : row + 1, :count] for tap, state in part.items()}
    return type(out)(states, out.logits[row : row + 1, :count])


@pytest.mark.parametrize("parents", [None, TREE])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
@pytest.mark.parametrize("row", [0, 1])
@torch.no_grad()
def test_a_row_gets_its_bits_whatever_is_scored_beside_and_after_it(pair, parents, count, row):
    trunk, nodes = pair[1], TOKENS[:, 2:8]
    together = score(trunk, filled(trunk), nodes, parents)
    few = None if parents is None else parents[row : row + 1, : count - 1]
    alone = score(trunk, filled(trunk, [row]), nodes[row : row + 1, :count], few)
    same_bits(alone, of_row(together, row, count))


@pytest.mark.parametrize("parents", [None, TREE])
@pytest.mark.parametrize("middle", range(LAYERS + 1))
@torch.no_grad()
def test_left_and_entered_again_after_any_layer_it_gives_the_same_bits(pair, parents, middle):
    trunk, nodes = pair[1], TOKENS[:, 2:8]
    whole = score(trunk, filled(trunk), nodes, parents)
    cache = filled(trunk)
    window = cache.open(6, parents=parents)
    options = {"positions": window.positions, "mask": window.mask, "cache": cache}
    early, below = trunk.run(trunk.embed(nodes), 0, middle, taps=ALL, **options)
    above = trunk(nodes, start=middle, states=early, taps=ALL, **options)
    same_bits(type(above)(below | above.states, above.logits), whole)


@pytest.mark.parametrize("taps", [(), (0,), (1,), (LAYERS,), (LAYERS - 1, 1), (1, 1)])
@torch.no_grad()
def test_tapped_states_are_those_of_the_layers_run_one_by_one(pair, taps):
    trunk = pair[1]
    hidden, found = trunk.run(trunk.embed(TOKENS), 0, LAYERS, taps=taps)
    states = [trunk.embed(TOKENS)]
    rotary = trunk.rotary(states[0], torch.arange(8)[None])
    for layer in trunk.layers:
        states.append(layer(states[-1], position_embeddings=rotary))
    assert torch.equal(hidden, states[-1])
    assert found.keys() == set(taps) - {LAYERS}
    assert all(torch.equal(found[tap], states[tap]) for tap in found)


@pytest.mark.parametrize("parents", [None, TREE])
@torch.no_grad()
def test_the_cache_holds_what_the_architectures_own_layers_would_have_left_in_it(pair, parents):
    keep = torch.tensor([[1, 0, 1, 0, 0, 1], [1, 1, 0, 1, 1, 0]]).bool()
    if parents is None:
        keep = torch.arange(6) < torch.tensor([[2], [5]])
    caches = [filled(trunk) for trunk in pair]
    for trunk, cache in zip(pair, caches, strict=True):
        score(trunk, cache, TOKENS[:, 2:8], parents)
        cache.commit(keep)
    assert caches[0].lengths == caches[1].lengths == [8 + int(keep[0].sum()), 3 + int(keep[1].sum())]
    for index in range(LAYERS):
        for theirs, ours in zip(caches[0].layers[index], caches[1].layers[index], strict=True):
            for row, length in enumerate(caches[0].lengths):
                torch.testing.assert_close(ours[row, :, :length], theirs[row, :, :length], **CLOSE)


@torch.no_grad()
def test_a_pass_over_the_trunk_is_one_call(pair, monkeypatch):
    trunk, calls = pair[1], []
    scored = Scorer.__call__
    monkeypatch.setattr(Scorer, "__call__", lambda *args, **given: calls.append(0) or scored(*args, **given))
    monkeypatch.setattr(CompiledLayer, "run", None)
    monkeypatch.setattr(CompiledLayer, "forward", None)
    score(trunk, filled(trunk, [0]), TOKENS[:1, :3])
    assert len(calls) == 2  # the prompt and the nodes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decoding_says_what_transformers_says(architecture):
    """Long enough for the cache to grow and for attention to go tile by tile."""
    network = Network(trunk_of(architecture, max_position_embeddings=256))
    theirs = network.trunk.model.generate(
        TOKENS[:1], max_new_tokens=90, min_new_tokens=90, do_sample=False, pad_token_id=0
    )
    network.compile_kernel()
    for drafter in ("none", "ngram"):
        found = generate(network, TOKENS[0].tolist(), drafter=drafter, max_new_tokens=90, eos_token_ids=())
        assert found[0].token_ids == theirs[0, 8:].tolist()
