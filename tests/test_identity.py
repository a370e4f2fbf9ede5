"""On the shipped network drafting gives plain decoding's ids, greedy and coupled, alone and in a batch.

And plain decoding gives transformers' own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import Sampling, generate
from decoding.generate import build_drafter, drafter_names
from mtp import Network
from training.prompts import held_out_documents, prompts

NETWORKS = Path(__file__).resolve().parents[1] / "networks"
OPTIONS = {"draft_model": {"model": NETWORKS / "pystdlib-draft"}}
WITHOUT_HEADS = ("medusa", "eagle")  # the shipped network has none for these
NAMES = [name for name in drafter_names() if name not in WITHOUT_HEADS]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 64, 128
FEW, FEW_TOKENS = 2, 48
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"verifier": "coupled", "sampling": Sampling(temperature=1.0)},
}
Ids = list[list[int]]


@pytest.fixture(scope="module")
def shipped() -> Network:
    return Network.from_pretrained(NETWORKS / "pystdlib", dtype=torch.float32)


@pytest.fixture(scope="module")
def held_out(shipped: Network) -> Ids:
    cut = prompts(held_out_documents(), PROMPTS, shipped.tokenizer, PROMPT_TOKENS)
    return [prompt.token_ids for prompt in cut]


@pytest.fixture(scope="module")
def plain(shipped: Network, held_out: Ids) -> Callable[[int, int, str], Ids]:
    """Plain decoding's ids of the first so many prompts, one prompt at a time."""
    known: dict[tuple[int, int, str], Ids] = {}

    def ids(count: int, new_tokens: int, mode: str = "greedy") -> Ids:
        key = (count, new_tokens, mode)
        if key not in known:
            alone = [
                generate(shipped, prompt, max_new_tokens=new_tokens, seed=row, **MODES[mode])[0]
                for row, prompt in enumerate(held_out[:count])
            ]
            known[key] = [completion.token_ids for completion in alone]
        return known[key]

    return ids


def drafted(network: Network, prompts: Ids, drafter: str, length: int, **settings: Any) -> Ids:
    """The ids of all prompts, decoded together."""
    built = build_drafter(network, drafter, **OPTIONS.get(drafter, {}))
    done = generate(network, prompts, drafter=built, num_draft_tokens=length, **settings)
    return [completion.token_ids for completion in done]


def transformers_ids(network: Network, prompt: list[int], new_tokens: int) -> list[int]:
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    out = network.trunk.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("drafter", NAMES)
def test_a_drafter_keeps_the_ids_of_plain_decoding(shipped, held_out, plain, drafter):
    """With the longest drafts, whose scores are rounded most unlike a single token's; `slow` has all."""
    found = drafted(shipped, held_out[:FEW], drafter, 8, max_new_tokens=FEW_TOKENS)
    assert found == plain(FEW, FEW_TOKENS)


def test_plain_decoding_equals_transformers(shipped, held_out, plain):
    theirs = [transformers_ids(shipped, prompt, FEW_TOKENS) for prompt in held_out[:FEW]]
    assert plain(FEW, FEW_TOKENS) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_every_drafter_and_length_keeps_the_ids_of_every_prompt(
    shipped, held_out, plain, mode, drafter, length
):
    found = drafted(shipped, held_out, drafter, length, max_new_tokens=NEW_TOKENS, **MODES[mode])
    assert found == plain(PROMPTS, NEW_TOKENS, mode)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95)], ids=["greedy", "sampled"]
)
def test_sixteen_ragged_rows_give_the_ids_of_sixteen_single_runs(shipped, held_out, drafter, sampling):
    """Prompts of 4, 8, ... 64 tokens, with limits and seeds of their own."""
    ragged = [prompt[: 4 * (row + 1)] for row, prompt in enumerate(held_out[:16])]
    limits = [NEW_TOKENS - 5 * row for row in range(16)]
    together = drafted(shipped, ragged, drafter, 4, max_new_tokens=limits, sampling=sampling, seed=7)
    for row, (prompt, limit) in enumerate(zip(ragged, limits, strict=True)):
        alone = drafted(shipped, [prompt], drafter, 4, max_new_tokens=limit, sampling=sampling, seed=7 + row)
        assert alone == [together[row]], row


@pytest.mark.slow
def test_plain_decoding_equals_transformers_on_every_prompt(shipped, held_out, plain):
    theirs = [transformers_ids(shipped, prompt, NEW_TOKENS) for prompt in held_out]
    assert plain(PROMPTS, NEW_TOKENS) == theirs
