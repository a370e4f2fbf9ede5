"""On a CUDA device: the same tokens as plain decoding in float32, near-ties apart in bfloat16."""

import pytest
import torch
from drafters import drafter_for
from tiny import tiny_network

from decoding import Sampling, generate
from decoding.generate import drafter_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]


@pytest.mark.parametrize("drafter", drafter_names())
def test_greedy_in_float32_gives_plain_decodings_tokens(drafter):
    network = tiny_network().to("cuda")
    plain = generate(network, PROMPTS, max_new_tokens=60)
    drafted = generate(network, PROMPTS, drafter=drafter_for(network, drafter), max_new_tokens=60)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


@pytest.mark.parametrize("drafter", drafter_names())
def test_bfloat16_picks_the_best_token_up_to_near_ties(drafter):
    network = tiny_network().to("cuda", torch.bfloat16)
    out = generate(network, PROMPTS[2], drafter=drafter_for(network, drafter), max_new_tokens=60)[0]
    row = torch.tensor([out.prompt_ids + out.token_ids], device="cuda")
    with torch.no_grad():
        logits = network.trunk(row).logits[0, len(out.prompt_ids) - 1 : -1].float()
    taken = logits.gather(1, row[0, len(out.prompt_ids) :, None])[:, 0]
    gap = logits.amax(-1) - taken
    assert (gap <= 0.02 * logits.abs().amax(-1)).all()


def test_a_seed_repeats():
    network = tiny_network().to("cuda")
    options = {"drafter": "sequential", "sampling": Sampling(temperature=1.0), "max_new_tokens": 40}
    first = generate(network, PROMPTS, seed=3, **options)
    assert [out.token_ids for out in generate(network, PROMPTS, seed=3, **options)] == [
        out.token_ids for out in first
    ]
