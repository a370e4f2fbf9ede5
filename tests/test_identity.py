"""On the shipped network greedy drafting gives plain decoding's ids, and plain decoding transformers' own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding import generate
from decoding.generate import build_drafter, drafter_names
from mtp import Network
from training.prompts import held_out_documents, prompts

NETWORKS = Path(__file__).resolve().parents[1] / "networks"
OPTIONS = {"draft_model": {"model": NETWORKS / "pystdlib-draft"}}
WITHOUT_HEADS = ("medusa", "eagle")  # the shipped network has none for these
NAMES = [name for name in drafter_names() if name not in WITHOUT_HEADS]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 64, 128
FEW, FEW_TOKENS = 2, 48
Ids = list[list[int]]


@pytest.fixture(scope="module")
def shipped() -> Network:
    return Network.from_pretrained(NETWORKS / "pystdlib", dtype=torch.float32)


@pytest.fixture(scope="module")
def held_out(shipped: Network) -> Ids:
    cut = prompts(held_out_documents(), PROMPTS, shipped.tokenizer, PROMPT_TOKENS)
    return [prompt.token_ids for prompt in cut]


@pytest.fixture(scope="module")
def plain(shipped: Network, held_out: Ids) -> Callable[[int, int], Ids]:
    """Plain decoding's ids of the first so many prompts, one prompt at a time."""
    known: dict[tuple[int, int], Ids] = {}

    def ids(count: int, new_tokens: int) -> Ids:
        if (count, new_tokens) not in known:
            alone = [generate(shipped, prompt, max_new_tokens=new_tokens)[0] for prompt in held_out[:count]]
            known[count, new_tokens] = [completion.token_ids for completion in alone]
        return known[count, new_tokens]

    return ids


def drafted(network: Network, prompts: Ids, drafter: str, length: int, new_tokens: int) -> Ids:
    """The ids of all prompts, decoded together."""
    built = build_drafter(network, drafter, **OPTIONS.get(drafter, {}))
    done = generate(network, prompts, drafter=built, num_draft_tokens=length, max_new_tokens=new_tokens)
    return [completion.token_ids for completion in done]


def transformers_ids(network: Network, prompt: list[int], new_tokens: int) -> list[int]:
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    out = network.trunk.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("drafter", NAMES)
def test_a_drafter_keeps_the_ids_of_plain_decoding(shipped, held_out, plain, drafter, length):
    assert drafted(shipped, held_out[:FEW], drafter, length, FEW_TOKENS) == plain(FEW, FEW_TOKENS)


def test_plain_decoding_equals_transformers(shipped, held_out, plain):
    theirs = [transformers_ids(shipped, prompt, FEW_TOKENS) for prompt in held_out[:FEW]]
    assert plain(FEW, FEW_TOKENS) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("drafter", NAMES)
def test_every_drafter_and_length_keeps_the_ids_of_every_prompt(shipped, held_out, plain, drafter, length):
    assert drafted(shipped, held_out, drafter, length, NEW_TOKENS) == plain(PROMPTS, NEW_TOKENS)


@pytest.mark.slow
def test_plain_decoding_equals_transformers_on_every_prompt(shipped, held_out, plain):
    theirs = [transformers_ids(shipped, prompt, NEW_TOKENS) for prompt in held_out]
    assert plain(PROMPTS, NEW_TOKENS) == theirs
