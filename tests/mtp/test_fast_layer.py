"""The fast layer says what the architecture's own module says, whatever mask, cache, batch or cut."""

import copy
import functools

import architectures
import pytest
import torch
from architectures import LAYERS, trunk_of

from decoding.cache import KVCache
from mtp import Network
from mtp.block import Block
from mtp.fast_layer import additive
from mtp.trunk import ARCHITECTURES

TOKENS = torch.tensor([[1, 5, 2, 2, 9, 7, 30, 4], [3, 3, 3, 1, 8, 63, 0, 6]])
ROPES = ({}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}})
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request):
    """The same trunk as it is and packed."""
    ours = trunk_of(request.param)
    packed = copy.deepcopy(ours)
    assert Network(packed).pack() is None
    return ours, packed


agree = functools.partial(architectures.agree, **CLOSE)


@torch.no_grad()
def test_a_text_without_a_mask_is_causal(pair):
    agree(pair, TOKENS)
    agree(pair, TOKENS[:, :1])


@torch.no_grad()
def test_any_mask_and_any_positions_are_obeyed(pair):
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 8, 8) < 0.5
    mask |= torch.eye(8, dtype=torch.bool)
    agree(pair, TOKENS, mask=mask)
    agree(pair, TOKENS, mask=mask[:1], positions=torch.randint(0, 60, (2, 8)))
    agree(pair, TOKENS[:1, :1], mask=mask[:1, :, :1, :1] | True, positions=torch.tensor([[9]]))


@pytest.mark.parametrize("start", range(LAYERS + 1))
@torch.no_grad()
def test_it_can_be_entered_and_left_after_any_layer(pair, start):
    states = pair[0](TOKENS, taps=(start,)).states[start] if start < LAYERS else torch.randn(2, 8, 32)
    agree(pair, TOKENS, start=start, states=states)
    left = [trunk.run(trunk.embed(TOKENS), 0, start)[0] for trunk in pair]
    torch.testing.assert_close(left[1], left[0], **CLOSE)


@pytest.mark.parametrize("parents", [None, [[0, 0, 1], [0, -1, -1]]])
@torch.no_grad()
def test_rows_of_different_lengths_share_a_cache(pair, parents):
    results = []
    for trunk in pair:
        cache = KVCache(2, torch.device("cpu"))
        window = cache.open(8)
        trunk(TOKENS, positions=window.positions, mask=window.mask, cache=cache)
        cache.commit(torch.arange(8) < torch.tensor([[8], [3]]))
        window = cache.open(4, parents=None if parents is None else torch.tensor(parents))
        out = trunk(TOKENS[:, :4], positions=window.positions, mask=window.mask, cache=cache)
        results.append(out.logits)
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@torch.no_grad()
def test_the_models_own_forward_runs_on_fast_layers(pair):
    theirs, ours = pair
    padding = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
    expected = theirs.model(TOKENS, attention_mask=padding).logits
    found = ours.model(TOKENS, attention_mask=padding).logits
    torch.testing.assert_close(found[padding.bool()], expected[padding.bool()], **CLOSE)


@pytest.mark.parametrize("options", ROPES)
@torch.no_grad()
def test_scaled_rotary_embeddings_and_biases_are_kept(options):
    ours = trunk_of("llama", attention_bias=True, mlp_bias=True, **options)
    packed = copy.deepcopy(ours)
    Network(packed).pack()
    agree((ours, packed), TOKENS)


@torch.no_grad()
def test_a_heads_block_is_a_fast_layer_too():
    trunk = trunk_of("qwen3")
    block = Block(trunk)
    hidden, positions = torch.randn(2, 8, 32), torch.arange(8)[None]
    expected = block(hidden, trunk.rotary(hidden, positions))
    network = Network(trunk, {"block": block})
    network.pack()
    torch.testing.assert_close(block(hidden, trunk.rotary(hidden, positions)), expected, **CLOSE)


def test_the_heads_of_a_key_are_rows_of_one_mask():
    mask = torch.tensor([[[[True, False], [True, True]]]])
    assert additive(mask, 2, torch.float32)[0, 0].tolist() == [
        [0.0, -torch.inf], [0.0, -torch.inf], [0.0, 0.0], [0.0, 0.0],
    ]  # fmt: skip
