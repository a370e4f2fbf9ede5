"""Penalties, bans, minimum length and a user's processors: at every node with that node's own prefix."""

import pytest
import torch
from drafters import drafter_for
from tiny import tiny_network

from decoding import Sampling, generate
from decoding.generate import drafter_names
from mtp import UserError

PROMPTS = [[1, 2, 3, 4], [7, 8, 9, 7, 8, 9, 7, 8]]


class NoImmediateRepeat:
    """A user's processor that looks at the prefix: the last token may not come again at once."""

    def __call__(self, ids, scores):
        return scores.index_fill(1, ids[0, -1:], -torch.inf)


SETTINGS = {
    "penalty": Sampling(repetition_penalty=1.3),
    "bans": Sampling(bad_words=((49,), (13, 16))),
    "own": Sampling(processors=(NoImmediateRepeat(),)),
    "all": Sampling(repetition_penalty=1.2, bad_words=((7,),), processors=(NoImmediateRepeat(),)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", drafter_names())
def test_greedy_with_processors_gives_plain_decodings_tokens(network, name, drafter):
    options = {"sampling": SETTINGS[name], "max_new_tokens": 24}
    plain = [out.token_ids for out in generate(network, PROMPTS, **options)]
    assert [
        out.token_ids for out in generate(network, PROMPTS, drafter=drafter_for(network, drafter), **options)
    ] == plain
    assert plain != [out.token_ids for out in generate(network, PROMPTS, max_new_tokens=24)]


@pytest.mark.parametrize(
    ("sampling", "theirs"),
    [
        (SETTINGS["penalty"], {"repetition_penalty": 1.3}),
        (SETTINGS["bans"], {"bad_words_ids": [[49], [13, 16]]}),
    ],
)
def test_plain_decoding_with_processors_equals_transformers_generate(network, sampling, theirs):
    for prompt in PROMPTS:
        expected = network.trunk.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0, **theirs
        )
        out = generate(network, prompt, sampling=sampling, max_new_tokens=24)[0]
        assert out.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("drafter", drafter_names())
def test_min_new_tokens_holds_the_end_back(network, drafter):
    plain = generate(network, PROMPTS[0], max_new_tokens=30)[0].token_ids
    eos = plain[2]
    ended = generate(
        network, PROMPTS[0], drafter=drafter_for(network, drafter), max_new_tokens=30, eos_token_ids=eos
    )[0]
    held = generate(
        network,
        PROMPTS[0],
        drafter=drafter_for(network, drafter),
        max_new_tokens=30,
        eos_token_ids=eos,
        sampling=Sampling(min_new_tokens=12),
    )[0]
    assert ended.token_ids == plain[: plain.index(eos) + 1]
    assert eos not in held.token_ids[:12]


def test_rows_keep_their_own_processors(network):
    samplings = [Sampling(), SETTINGS["all"]]
    together = generate(network, PROMPTS, drafter="sequential", sampling=samplings, max_new_tokens=24)
    for prompt, sampling, row in zip(PROMPTS, samplings, together, strict=True):
        assert generate(network, prompt, sampling=sampling, max_new_tokens=24)[0].token_ids == row.token_ids


def test_sampled_laws_are_adjusted_for_draft_and_target_alike():
    """A perfect exit stays perfect under a penalty: draft and target see the same prefix at every node."""
    network = tiny_network(seed=3, layers=3)
    with torch.no_grad():
        for layer in network.trunk.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, min_p=0.05)
    out = generate(network, [PROMPTS[0]] * 20, drafter="early_exit", sampling=sampling, max_new_tokens=20)
    assert sum(row.acceptance.accepted for row in out) == sum(row.acceptance.tested for row in out)


@pytest.mark.parametrize("drafter", drafter_names())
def test_log_probabilities_are_the_trunks_own_at_every_emitted_token(network, drafter):
    """Case 24: recomputed by feeding the output back; one value a token, also where an EOS cuts a block."""
    plain = generate(network, PROMPTS[1], max_new_tokens=20)[0].token_ids
    for options in ({}, {"sampling": Sampling(temperature=0.7, top_k=20)}, {"eos_token_ids": plain[9]}):
        out = generate(
            network,
            PROMPTS[1],
            drafter=drafter_for(network, drafter),
            max_new_tokens=20,
            logprobs=True,
            **options,
        )[0]
        row = torch.tensor([out.prompt_ids + out.token_ids])
        with torch.no_grad():
            logits = network.trunk(row).logits[0, len(out.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, row[0, len(out.prompt_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5), ("repetition_penalty", 0.0), ("min_new_tokens", -1), ("bad_words", ("",)),
        ("top_p", 0.0), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", -1.0),
        ("top_k", 2.5),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(UserError, match=field):
        Sampling(**{field: value})


def test_bad_words_as_text_need_a_tokenizer(network):
    with pytest.raises(UserError, match="bad_words"):
        generate(network, PROMPTS[0], sampling=Sampling(bad_words=("x",)), max_new_tokens=4)
