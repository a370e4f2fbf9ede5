"""The trunk seen layer by layer is the Hugging Face model itself."""

import pytest
import torch
from architectures import LAYERS, config_of, trunk_of
from tiny import tiny_trunk
from transformers import AutoConfig, AutoModelForCausalLM

from mtp import Trunk, UserError
from mtp.trunk import ARCHITECTURES, check_architecture

TOKENS = torch.tensor([[1, 5, 2, 2, 9, 7, 30, 4], [3, 3, 3, 1, 8, 63, 0, 6]])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trunk(request) -> Trunk:
    return trunk_of(request.param)


@torch.no_grad()
def test_every_tap_is_the_models_own_hidden_state(trunk):
    out = trunk(TOKENS, taps=tuple(range(LAYERS + 1)))
    theirs = trunk.model(TOKENS, output_hidden_states=True)
    assert len(theirs.hidden_states) == LAYERS + 1
    for layer, expected in enumerate(theirs.hidden_states):
        torch.testing.assert_close(out.states[layer], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.logits, theirs.logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_only_the_taps_asked_for_come_back(trunk):
    assert trunk(TOKENS, taps=(2,)).states.keys() == {2}
    silent = trunk(TOKENS, taps=(1, LAYERS), logits=False)
    assert silent.states.keys() == {1, LAYERS}
    assert silent.logits is None
    assert torch.equal(silent.states[LAYERS], trunk(TOKENS, taps=(LAYERS,)).states[LAYERS])


@pytest.mark.parametrize("cut", range(LAYERS + 1))
@torch.no_grad()
def test_the_layers_run_in_two_parts_give_what_they_give_in_one(trunk, cut):
    lower, _ = trunk.run(trunk.embed(TOKENS), 0, cut)
    upper, _ = trunk.run(lower, cut, LAYERS)
    assert torch.equal(trunk.unembed(upper), trunk(TOKENS).logits)
    assert torch.equal(trunk(TOKENS, start=cut, states=lower).logits, trunk(TOKENS).logits)


@torch.no_grad()
def test_a_dropped_layer_is_passed_by_in_the_dropped_rows_alone(trunk):
    keep = torch.ones(LAYERS, 2, dtype=torch.bool)
    keep[1, 0] = False
    taps = tuple(range(LAYERS))
    states = trunk(TOKENS, taps=taps, keep=keep).states
    whole = trunk(TOKENS, taps=taps).states
    assert torch.equal(states[2][0], states[1][0])
    assert not torch.equal(whole[2][0], whole[1][0])
    torch.testing.assert_close(states[2][1], whole[2][1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_all_layers_kept_is_the_model_and_none_kept_is_the_embedding(trunk):
    all_kept = torch.ones(LAYERS, 2, dtype=torch.bool)
    assert torch.equal(trunk(TOKENS, keep=all_kept).logits, trunk(TOKENS).logits)
    assert torch.equal(trunk(TOKENS, keep=~all_kept).logits, trunk.unembed(trunk.embed(TOKENS)))


@torch.no_grad()
def test_later_layers_see_what_a_dropped_layer_left(trunk):
    """Row 0 without layer 1 is the model made of layers 0 and 2."""
    keep = torch.ones(LAYERS, 2, dtype=torch.bool)
    keep[1, 0] = False
    first, _ = trunk.run(trunk.embed(TOKENS), 0, 1)
    last, _ = trunk.run(first, 2, 3)
    torch.testing.assert_close(
        trunk(TOKENS, keep=keep).logits[0], trunk.unembed(last)[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "phi3", "mixtral"])
def test_another_architecture_is_refused_by_name(model_type):
    with pytest.raises(UserError, match=f"'{model_type}' is not one of llama, mistral, qwen2, qwen3"):
        check_architecture(AutoConfig.for_model(model_type))


def test_a_rotary_embedding_that_depends_on_the_length_is_refused():
    config = config_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UserError, match="'dynamic' depends on the length"):
        trunk_of_config(config)


@torch.no_grad()
def test_a_rescaled_rotary_embedding_that_does_not_is_the_models_own():
    trunk = trunk_of("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    torch.testing.assert_close(trunk(TOKENS).logits, trunk.model(TOKENS).logits, atol=1e-5, rtol=1e-5)


def trunk_of_config(config) -> Trunk:
    return Trunk(AutoModelForCausalLM.from_config(config))


@torch.no_grad()
def test_a_sliding_window_bounds_the_context_and_inside_it_nothing_differs():
    trunk = trunk_of("mistral", sliding_window=8)
    assert trunk.context == 8
    torch.testing.assert_close(trunk(TOKENS).logits, trunk.model(TOKENS).logits, atol=1e-5, rtol=1e-5)
    longer = torch.cat([TOKENS, TOKENS], dim=1)
    assert (trunk(longer).logits - trunk.model(longer).logits).abs().max() > 0.1


def test_a_window_that_is_not_used_or_longer_than_the_positions_bounds_nothing():
    assert trunk_of("qwen2", sliding_window=8, use_sliding_window=False).context == 64
    assert trunk_of("qwen2", sliding_window=8, use_sliding_window=True).context == 8
    assert trunk_of("mistral", sliding_window=4096).context == 64
    assert trunk_of("mistral", sliding_window=None).context == 64
    assert trunk_of("llama").context == 64


@torch.no_grad()
def test_a_model_with_eager_attention_is_causal_too():
    expected = tiny_trunk()(TOKENS).logits
    model = tiny_trunk().model
    model.set_attn_implementation("eager")
    torch.testing.assert_close(Trunk(model)(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)
