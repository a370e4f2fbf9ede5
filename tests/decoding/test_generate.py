"""Greedy decoding with every drafter gives plain decoding's tokens, and plain decoding gives transformers'
own."""

import pytest
import torch
from drafters import drafter_for
from tiny import tiny_network, tiny_trunk

from decoding import generate
from decoding.generate import drafter_names
from decoding.loop import VERIFIERS
from mtp import Network, UserError

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [3, 3], [7, 8, 9, 7, 8, 9, 7, 8]]


def ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def plain(network):
    return ids(generate(network, PROMPTS, max_new_tokens=40))


def test_plain_decoding_equals_transformers_generate(network, plain):
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        expected = network.trunk.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert expected[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_other_architectures_equal_transformers_generate(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    from mtp import Trunk

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        max_position_embeddings=128, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = model.generate(torch.tensor([PROMPTS[2]]), do_sample=False, max_new_tokens=30, pad_token_id=0)
    for drafter in ("none", "early_exit"):
        out = generate(Network(Trunk(model)), PROMPTS[2], drafter=drafter, max_new_tokens=30)
        assert out[0].token_ids == expected[0, len(PROMPTS[2]) :].tolist()


LOSSLESS = [name for name, verifier in VERIFIERS.items() if verifier.lossless]
# Every length with one verifier, and every verifier with one length.
CASES = [
    *(("token", length) for length in (0, 1, 3, 8)),
    *((name, 5) for name in LOSSLESS if name != "token"),
]


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize(("verifier", "num_draft_tokens"), CASES)
def test_every_drafter_gives_plain_decodings_tokens(network, plain, drafter, num_draft_tokens, verifier):
    together = generate(
        network,
        PROMPTS,
        drafter=drafter_for(network, drafter),
        num_draft_tokens=num_draft_tokens,
        verifier=verifier,
        max_new_tokens=40,
    )
    assert ids(together) == plain


@pytest.mark.parametrize("drafter", drafter_names())
def test_a_row_does_not_depend_on_the_rows_beside_it(network, drafter):
    options = {"drafter": drafter_for(network, drafter), "max_new_tokens": 25}
    lone = [generate(network, prompt, **options)[0].token_ids for prompt in PROMPTS]
    assert ids(generate(network, PROMPTS, **options)) == lone


@pytest.mark.parametrize("drafter", drafter_names())
def test_exit_and_drafts_use_every_layer_again_afterwards(network, plain, drafter):
    generate(network, PROMPTS, drafter=drafter_for(network, drafter), max_new_tokens=10)
    assert ids(generate(network, PROMPTS, max_new_tokens=40)) == plain


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("limit", [0, 1, 2, 9, 31])
def test_the_limit_is_met_exactly(network, plain, drafter, limit):
    options = {"drafter": drafter_for(network, drafter), "num_draft_tokens": 8}
    out = generate(network, PROMPTS[-1], max_new_tokens=limit, **options)[0]
    assert out.token_ids == plain[-1][:limit]
    assert len(out.token_ids) == limit
    assert out.finish_reason == "length"


@pytest.mark.parametrize("drafter", drafter_names())
def test_the_context_is_filled_and_never_overrun(drafter):
    network = tiny_network(context=32)
    options = {"drafter": drafter_for(network, drafter), "num_draft_tokens": 5}
    out = generate(network, PROMPTS[2], max_new_tokens=99, **options)[0]
    assert len(out.token_ids) == 24
    assert out.finish_reason == "context"
    assert out.token_ids == generate(network, PROMPTS[2], max_new_tokens=24)[0].token_ids


def test_equal_best_logits_go_to_the_lowest_id():
    trunk = tiny_trunk(vocab_size=24)
    with torch.no_grad():
        trunk.model.lm_head.weight[19] = trunk.model.lm_head.weight[7]
    network = Network(trunk)
    tokens = set()
    for drafter in ("none", "ngram", "early_exit"):
        tokens |= set(generate(network, PROMPTS[0], drafter=drafter, max_new_tokens=60)[0].token_ids)
    assert 7 in tokens
    assert 19 not in tokens


def test_a_second_use_in_the_same_process_is_like_the_first(network):
    first = ids(generate(network, PROMPTS, drafter="sequential", max_new_tokens=20))
    generate(network, PROMPTS[2], drafter="sequential", max_new_tokens=30)
    assert ids(generate(network, PROMPTS, drafter="sequential", max_new_tokens=20)) == first


@pytest.mark.parametrize("drafter", drafter_names())
def test_counts_add_up(network, drafter):
    for out in generate(network, PROMPTS, drafter=drafter_for(network, drafter), max_new_tokens=30):
        a = out.acceptance
        assert a.emitted == len(out.token_ids)
        assert a.accepted + a.steps >= a.emitted > a.accepted  # every step adds one token of the trunk's own
        assert all(x <= y for x, y in zip(a.accepted_at_depth, a.tested_at_depth, strict=True))
        assert drafter != "none" or a.tau == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafter": "sequental"}, "drafter='sequental'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1"),
        ({"num_draft_tokens": True}, "num_draft_tokens=True"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"verifier": "tokn"}, "verifier='tokn'"),
        ({"prompts": []}, "prompt"),
        ({"prompts": [[]]}, "prompt_ids is empty"),
        ({"prompts": [[64]]}, "64"),
        ({"prompts": "text"}, "no tokenizer"),
        ({"prompts": [[1] * 300]}, "300 tokens"),
        ({"seed": [1, 2]}, "seed"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_what_a_user_gets_wrong_is_named(network, options, named):
    with pytest.raises(UserError, match=named):
        generate(network, **{"prompts": PROMPTS[0], "max_new_tokens": 4} | options)


def test_a_drafter_without_its_head_is_refused_by_name():
    with pytest.raises(UserError, match="has no sequential head"):
        generate(Network(tiny_trunk()), PROMPTS[0], drafter="sequential")
