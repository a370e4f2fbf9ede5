"""transformers' own generate with speculation inside: the same ids, rows, padding, streams and refusals."""

import threading

import pytest
import torch
from drafters import needed
from tiny import spelling_network, tiny_network, tiny_trunk
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from decoding import speculative
from decoding.draft import Autoregressive
from decoding.generate import drafter_names
from decoding.hf import settings_of
from decoding.sampling import RowSampling, law
from mtp import Network, UserError

IDS = torch.tensor([[9, 8, 7, 1, 2, 3, 9, 8]])
RAGGED = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [9, 8, 7, 1, 2, 3, 9, 8], [0, 0, 0, 0, 0, 0, 0, 5]])
MASK = (RAGGED != 0).long()


@pytest.fixture(scope="module")
def model():
    return tiny_trunk().model


def both(model, ids=IDS, speculation=None, **options):
    options = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0} | options
    expected = model.generate(ids, **options)
    found = model.generate(ids, **options, custom_generate=speculation or speculative(num_draft_tokens=4))
    return found.tolist(), expected.tolist()


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("ids", [IDS, RAGGED])
def test_every_drafter_gives_the_ids_of_greedy_generate(network, drafter, ids):
    options = {"network": network, "num_draft_tokens": 3} | needed(network, drafter)
    speculation = speculative(drafter, **options)
    mask = {} if ids is IDS else {"attention_mask": MASK}
    found, expected = both(network.trunk.model, ids, speculation, **mask)
    assert found == expected


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "early_exit", "layer_skip"])
def test_a_plain_model_needs_no_network(model, drafter):
    found, expected = both(model, speculation=speculative(drafter))
    assert found == expected


class Push(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + torch.sin(input_ids[:, -1:] * torch.arange(scores.shape[1]) * 1.0)


class UntilThree(StoppingCriteria):
    """Stops when three equal tokens stand anywhere in the row."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([max(row.bincount(minlength=2)[1:]) >= 3 for row in input_ids])


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 21},
        {"eos_token_id": list(range(20, 40))},
        {"eos_token_id": list(range(20, 50)), "min_new_tokens": 6},
        {"eos_token_id": list(range(20, 50)), "min_length": 13},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[t] for t in range(10, 40)] + [[3, 9]]},
        {"suppress_tokens": list(range(30, 64)), "begin_suppress_tokens": list(range(10))},
        {"sequence_bias": [[[7], 6.0], [[8, 7], -9.0]]},
        {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 11},
        {"forced_eos_token_id": 11, "eos_token_id": 11},
        {"logits_processor": LogitsProcessorList([Push()])},
        {"stopping_criteria": StoppingCriteriaList([UntilThree()]), "eos_token_id": 63},
        {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] + 5) % 64, int(ids[0]), 8]},
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_settings_mean_what_they_mean_to_transformers(model, options, ragged):
    given = {"ids": RAGGED, "attention_mask": MASK} if ragged else {"ids": IDS}
    if ragged and "prefix_allowed_tokens_fn" in options:
        with pytest.raises(UserError, match="prefix_allowed_tokens_fn"):
            both(model, **given, **options)
        return
    found, expected = both(model, **given, **options)
    assert found == expected


def test_a_stop_string_ends_where_transformers_ends():
    network = spelling_network("two, phrases.")
    ids = torch.tensor([network.tokenizer("tw")["input_ids"]])
    found, expected = both(
        network.trunk.model, ids, stopping_criteria=[StopStringCriteria(network.tokenizer, [", p"])]
    )
    assert found == expected
    assert network.tokenizer.decode(found[0]).endswith(", p")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 0, "typical_p": 0.9},
        {"top_k": 9, "epsilon_cutoff": 0.02, "renormalize_logits": True},
        {"temperature": 0.6, "repetition_penalty": 1.5, "bad_words_ids": [[5], [6]]},
    ],
)
def test_the_sampled_law_is_transformers_own(model, options):
    config = GenerationConfig(do_sample=True, **options)
    config, _ = model._prepare_generation_config(config)
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        config, input_ids_seq_length=8, encoder_input_ids=IDS, device="cpu"
    )
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) * 3
    expected = processors(IDS, logits.clone()).softmax(-1)
    rules, settings = settings_of(list(processors), True)
    scores = logits.clone()
    for rule in rules:
        scores = rule(IDS, scores)
    found = law(scores[:, None], RowSampling.stack([settings], 64, torch.device("cpu")))[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_common_filters_are_computed_for_all_rows_at_once(model):
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    config, _ = model._prepare_generation_config(config)
    model._prepare_special_tokens(config, device="cpu")
    rules, settings = settings_of(list(model._get_logits_processor(config, device="cpu")), True)
    assert rules == []
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (0.7, 5, 0.9, 0.1)


def test_sampled_tokens_follow_the_law_of_generate(model):
    """Counts of the second and third token from 2,000 rows each, rare ones pooled: chi-square of the two."""
    options = {
        "do_sample": True, "temperature": 0.8, "top_k": 6, "max_new_tokens": 3,
        "num_return_sequences": 2000, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    mine = model.generate(IDS, **options, custom_generate=speculative("early_exit", num_draft_tokens=2))
    theirs = model.generate(IDS, **options)
    for place in (-2, -1):
        a, b = (torch.bincount(x[:, place], minlength=64).double() for x in (mine, theirs))
        common = (a + b) >= 20
        a, b = (torch.cat([x[common], x[~common].sum()[None]]) for x in (a, b))
        some = (a + b) > 0
        chi = ((a - b)[some] ** 2 / (a + b)[some]).sum()
        freedom = int(some.sum()) - 1
        assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_torchs_seed_and_our_own_repeat_a_sample(model):
    options = {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0}

    def run(torch_seed, **seed):
        torch.manual_seed(torch_seed)
        return model.generate(IDS, **options, custom_generate=speculative("ngram", **seed)).tolist()

    assert run(1) == run(1) != run(2)
    assert run(1, seed=3) == run(2, seed=3)


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def test_a_streamer_gets_the_prompt_then_every_token_then_the_end(model):
    mine, theirs = Recorder(), Recorder()
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    model.generate(IDS, **options, streamer=theirs)
    model.generate(IDS, **options, streamer=mine, custom_generate=speculative("early_exit"))
    assert mine.calls == theirs.calls


def test_text_streamers_show_the_text(capsys):
    network = spelling_network("naïve café, ")
    tokenizer, model = network.tokenizer, network.trunk.model
    ids = torch.tensor([tokenizer("na")["input_ids"]])
    options = {"max_new_tokens": 30, "pad_token_id": 0, "custom_generate": speculative("ngram")}
    out = model.generate(ids, **options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    text = tokenizer.decode(out[0, ids.shape[1] :])
    assert capsys.readouterr().out == text + "\n"
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs=options | {"streamer": pieces})
    thread.start()
    assert "".join(pieces) == text
    thread.join()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"use_cache": False}, "use_cache=False"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"max_new_tokens": 300}, "max_new_tokens=300"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])}, "attention_mask"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]])}, "attention_mask"),
        ({"position_ids": torch.arange(3, 11)[None]}, "position_ids"),
    ],
)
def test_what_speculation_cannot_do_is_refused_by_name(model, options, named):
    options = {"max_new_tokens": 5, "pad_token_id": 0, "custom_generate": speculative("ngram")} | options
    with pytest.raises(UserError, match=named):
        model.generate(IDS, **options)


def test_an_assistant_a_cache_and_embeddings_are_refused_by_name(model):
    from transformers import DynamicCache

    options = {"max_new_tokens": 5, "pad_token_id": 0, "custom_generate": speculative("ngram")}
    with pytest.raises(UserError, match="assistant_model"):
        model.generate(IDS, **options, assistant_model=tiny_trunk(layers=2).model)
    with pytest.raises(UserError, match="cache"):
        model.generate(IDS, **options, cache=DynamicCache(config=model.config))
    with pytest.raises(UserError, match="input"):
        model.generate(inputs_embeds=model.model.embed_tokens(IDS), **options)
    with pytest.raises(UserError, match="streamer: 3 rows"):
        model.generate(RAGGED, attention_mask=MASK, **options, streamer=Recorder())


def test_wrong_options_are_named_before_anything_is_decoded(model):
    with pytest.raises(UserError, match="verifier"):
        speculative(verifier="tokn")
    with pytest.raises(UserError, match="num_draft_tokens"):
        speculative(num_draft_tokens=-1)
    with pytest.raises(UserError, match="seed"):
        speculative(seed=0.5)
    with pytest.raises(UserError, match="skip"):
        speculative(Autoregressive(), skip=[1])
    with pytest.raises(UserError, match="drafter='ngrm'"):
        model.generate(IDS, custom_generate=speculative("ngrm"), pad_token_id=0)
    with pytest.raises(UserError, match="sequential"):
        model.generate(IDS, custom_generate=speculative("sequential"), pad_token_id=0)
    with pytest.raises(UserError, match="network"):
        model.generate(IDS, custom_generate=speculative(network=tiny_network()), pad_token_id=0)


def test_a_models_attention_is_given_back(model):
    eager = tiny_trunk().model
    eager.set_attn_implementation("eager")
    speculation = speculative("early_exit")
    for _ in range(2):  # the second time with the drafter that is there already
        found, expected = both(eager, speculation=speculation)
        assert found == expected
        assert eager.config._attn_implementation == "eager"
    assert eager.config._attn_implementation == "eager"


def test_greedy_decoding_leaves_torchs_generator_alone(model):
    torch.manual_seed(5)
    both(model)
    found = torch.rand(1)
    torch.manual_seed(5)
    assert found == torch.rand(1)


def test_drafter_options_are_passed_on_and_a_network_without_heads_will_do(model):
    speculation = speculative("layer_skip", network=Network(tiny_trunk()), skip=[1, 2])
    with pytest.raises(UserError, match="network"):
        both(model, speculation=speculation)
    found, expected = both(model, speculation=speculative("layer_skip", skip=[1, 2]))
    assert found == expected
