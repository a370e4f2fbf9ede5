"""Other packages behind one function: they continue a prompt as our plain decoding does."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_network

from decoding import generate, peers
from decoding.peers import PEERS, Checkpoint, build_peer, check_peer, missing
from mtp import UserError

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
TRANSFORMERS = ["transformers", "transformers_lookup", "transformers_early_exit"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    tiny_network().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def checkpoint(folder):
    return lambda eos=(): Checkpoint(folder, torch.float32, torch.device("cpu"), eos)


@pytest.mark.parametrize("name", [*TRANSFORMERS, "economize_lookup", "flashspec_lookup"])
def test_a_package_gives_the_tokens_of_plain_decoding(network, checkpoint, name):
    if package := missing(name):
        pytest.skip(f"{package} is not installed")
    plain = generate(network, PROMPT, max_new_tokens=24)[0].token_ids
    run = build_peer(name, name, checkpoint(), {})(PROMPT, 24)
    assert run.token_ids == plain
    assert run.seconds > 0


@pytest.mark.parametrize("name", [*TRANSFORMERS, "economize_lookup", "flashspec_lookup"])
def test_a_package_ends_where_ours_ends(network, checkpoint, name):
    if package := missing(name):
        pytest.skip(f"{package} is not installed")
    plain = generate(network, PROMPT, max_new_tokens=24)[0].token_ids
    eos = plain[5]
    run = build_peer(name, name, checkpoint((eos,)), {})(PROMPT, 24)
    assert run.token_ids == plain[: plain.index(eos) + 1]


def test_transformers_ways_share_a_model_and_other_packages_get_their_own(checkpoint):
    assert peers.unmodified(checkpoint()) is peers.unmodified(checkpoint())
    assert checkpoint().model() is not peers.unmodified(checkpoint())


@pytest.mark.parametrize("name", ["vllm", "vllm_lookup"])
def test_vllm_is_asked_for_greedy_tokens_that_end_at_our_eos(checkpoint, name, monkeypatch):
    asked = {}

    class Engine:
        def __init__(self, **options):
            asked["engine"] = options

        def generate(self, prompts, settings, use_tqdm):
            asked["prompts"], asked["settings"] = prompts, settings
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(4, 5))])]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    assert build_peer(name, name, checkpoint((5,)), {})(PROMPT, 7).token_ids == [4, 5]
    assert asked["prompts"] == [{"prompt_token_ids": PROMPT}]
    assert asked["settings"] == {
        "temperature": 0.0, "max_tokens": 7, "stop_token_ids": [5], "ignore_eos": False,
    }  # fmt: skip
    assert ("speculative_config" in asked["engine"]) == (name == "vllm_lookup")


def test_what_is_not_installed_is_known_before_it_is_called(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert missing("vllm_lookup") == "vllm"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("transfomers", {}, "peers: 'transfomers' is not one of transformers, "),
        ("transformers", {"num_tokens": 3}, "peers: transformers has no option num_tokens; it has none"),
        ("transformers_lookup", {"tokens": 3}, "has no option tokens; it has num_tokens"),
    ],
)
def test_a_peer_or_an_option_that_there_is_not_is_refused(name, options, told):
    with pytest.raises(UserError, match=told):
        check_peer(name, options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("transformers_lookup", {"num_tokens": 0}), ("transformers_early_exit", {"exit_layer": 4})],
)
def test_an_option_that_cannot_be_is_refused(checkpoint, name, options):
    with pytest.raises(UserError, match="is not a whole number"):
        build_peer(name, name, checkpoint(), options)


def test_every_peer_says_what_it_is():
    assert all(function.__doc__ for function in PEERS.values())
