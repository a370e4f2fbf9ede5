"""Layer skipping: what is left out, how it is found, and that no key of a draft pass outlives a step."""

import pytest
import torch
from omegaconf import OmegaConf
from tiny import spelling_network, tiny_network, tiny_trunk

from decoding import Sampling, generate
from decoding.cache import KVCache
from decoding.drafters.layer_skip import build
from decoding.generate import build_drafter
from decoding.layer_search import agreement, calibration_tokens, expected_accepted, found, search
from mtp import Network, UserError

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [3, 3]]
SETS = [[1], [2], [3], [1, 2], [1, 3], [2, 3], [1, 2, 3]]


def ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("skip", SETS)
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_any_set_of_layers_left_out_gives_plain_decodings_tokens(network, skip, num_draft_tokens):
    plain = ids(generate(network, PROMPTS, max_new_tokens=40))
    drafter = build(network, skip=skip)
    options = {"drafter": drafter, "num_draft_tokens": num_draft_tokens}
    assert ids(generate(network, PROMPTS, max_new_tokens=40, **options)) == plain


@pytest.mark.parametrize("skip", SETS)
def test_the_cache_holds_the_trunks_own_keys_after_every_step(network, skip):
    """Every layer's committed keys and values, before every proposal, against one pass over the text."""
    drafter = build(network, skip=skip)
    propose, checked = drafter.propose, []

    def checking(root, count, context):
        cache = drafter.cache
        length = cache.lengths[0]
        true = KVCache(1, network.trunk.device)
        window = true.open(length)
        network.trunk(texts[0][None, :length], positions=window.positions, mask=window.mask, cache=true)
        for layer, stored in cache.layers.items():
            for mine, other in zip(stored, true.layers[layer], strict=True):
                torch.testing.assert_close(mine[0, :, :length], other[0, :, :length], atol=1e-4, rtol=1e-4)
        checked.append(length)
        return propose(root, count, context)

    texts = []
    plain = generate(network, PROMPTS[2], max_new_tokens=40)[0].token_ids
    texts.append(torch.tensor(PROMPTS[2] + plain))
    drafter.propose = checking
    generate(network, PROMPTS[2], drafter=drafter, num_draft_tokens=4, max_new_tokens=40)
    assert len(checked) > 1


def test_leaving_out_layers_that_do_nothing_accepts_everything():
    network = Network(tiny_trunk(layers=6))
    with torch.no_grad():
        for layer in (2, 3, 4):
            network.trunk.layers[layer].self_attn.o_proj.weight.zero_()
            network.trunk.layers[layer].mlp.down_proj.weight.zero_()
    assert found(network, 0.5, None) == (2, 3, 4)
    out = generate(network, PROMPTS[0], drafter="layer_skip", num_draft_tokens=4, max_new_tokens=50)[0]
    assert build_drafter(network, "layer_skip").exit_layer >= 2
    assert build_drafter(network, "layer_skip", share=0.5).upper == [(5, 6)]
    assert out.acceptance.alpha == 1
    assert out.acceptance.tau == 5


def test_the_skipped_pass_is_the_trunk_built_without_these_layers():
    network = tiny_network(seed=3)
    whole, less = network.trunk, tiny_trunk(seed=3)
    tokens = torch.arange(1, 60)[None]
    with torch.no_grad():
        less.model.model.layers = torch.nn.ModuleList([less.layers[0], less.layers[3]])
        expected = less(tokens).logits.argmax(-1) == whole(tokens).logits.argmax(-1)
        found_ = agreement(whole, tokens, whole(tokens, taps=(1, 2, 3)), (1, 2))
    assert found_.tolist() == expected[0].tolist()


def test_drafts_do_not_depend_on_the_company_in_the_batch(network):
    options = {
        "drafter": "layer_skip", "sampling": Sampling(temperature=0.8), "max_new_tokens": 25,
        "num_draft_tokens": 4,
    }  # fmt: skip
    together = generate(network, PROMPTS, seed=7, **options)
    lone = [generate(network, prompt, seed=7 + r, **options)[0] for r, prompt in enumerate(PROMPTS)]
    assert ids(together) == ids(lone)
    assert [a.acceptance for a in together] == [b.acceptance for b in lone]


def test_a_search_is_made_once_and_comes_out_the_same_again(monkeypatch):
    network = tiny_network(layers=6)
    tokens = calibration_tokens(network, None)
    first, second = (search(network.trunk, tokens, 0.4) for _ in range(2))
    assert first == second == found(network, 0.4, None)
    monkeypatch.setattr("decoding.layer_search.search", None)
    assert len(build_drafter(network, "layer_skip").skip) == 2


def test_a_search_does_at_least_as_well_as_its_start():
    trunk = tiny_trunk(layers=8, seed=1)
    tokens = torch.arange(1, 60)[None]
    with torch.inference_mode():
        whole = trunk(tokens, taps=tuple(range(1, 8)))
        value = lambda skip: expected_accepted(agreement(trunk, tokens, whole, skip))  # noqa: E731
        ranked = sorted(range(1, 8), key=lambda layer: -value((layer,)))
        assert value(search(trunk, tokens, 0.4)) >= value(tuple(sorted(ranked[:3])))


def test_the_calibration_text_is_read_with_the_networks_tokenizer():
    network = spelling_network("abc")
    assert calibration_tokens(network, "cab").tolist() == [[101, 99, 100]]
    assert build(network, calibration="cab").skip == (1,)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"skip": [0]}, "0 is not one of the whole numbers from 1 to 3"),
        ({"skip": [4]}, "4 is not one of the whole numbers from 1 to 3"),
        ({"skip": [True]}, "True is not one of"),
        ({"skip": []}, "list of whole numbers from 1 to 3"),
        ({"skip": 2}, "skip=2 is not a list"),
        ({"skip": "12"}, "skip='12' is not a list"),
        ({"share": 0}, "share=0"),
        ({"share": 1.5}, "share=1.5"),
        ({"calibration": "text"}, "no tokenizer"),
        ({"calibration": 7}, "7 is not a text"),
    ],
)
def test_what_a_user_gets_wrong_is_named(network, options, named):
    with pytest.raises(UserError, match=named):
        build(network, **options)


def test_a_list_of_hydras_will_do(network):
    assert build(network, skip=OmegaConf.create([3, 1, 1])).skip == (1, 3)


def test_a_trunk_of_one_layer_is_refused():
    with pytest.raises(UserError, match="one layer"):
        build(Network(tiny_trunk(layers=1)))


def test_an_empty_calibration_text_is_refused():
    with pytest.raises(UserError, match="calibration"):
        build(spelling_network("abc"), calibration="")
