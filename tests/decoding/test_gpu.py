"""On a CUDA device: the same tokens as plain decoding in float32, near-ties apart in bfloat16.

With the network as it is and with its steps captured as graphs.
"""

import pytest
import torch
from drafters import drafter_for
from tiny import tiny_network

from decoding import Sampling, generate
from decoding.generate import drafter_names
from decoding.syncs import waits
from mtp.graphs import CapturedLayer, capture_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]


FORMS = ("plain", "captured")


def on_gpu(form: str, dtype: torch.dtype = torch.float32):
    network = tiny_network().to("cuda", dtype)
    if form == "captured":
        capture_modules(network, network.trunk, None)  # compiling is a test of its own
    return network


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafter", drafter_names())
def test_greedy_in_float32_gives_plain_decodings_tokens(drafter, form):
    network = on_gpu(form)
    expected = generate(tiny_network().to("cuda"), PROMPTS, max_new_tokens=60)
    plain = generate(network, PROMPTS, max_new_tokens=60)
    drafted = generate(network, PROMPTS, drafter=drafter_for(network, drafter), max_new_tokens=60)
    assert [out.token_ids for out in plain] == [out.token_ids for out in expected]
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafter", drafter_names())
def test_bfloat16_picks_the_best_token_up_to_near_ties(drafter, form):
    network = on_gpu(form, torch.bfloat16)
    out = generate(network, PROMPTS[2], drafter=drafter_for(network, drafter), max_new_tokens=60)[0]
    network.unpack()
    row = torch.tensor([out.prompt_ids + out.token_ids], device="cuda")
    with torch.no_grad():
        logits = network.trunk(row).logits[0, len(out.prompt_ids) - 1 : -1].float()
    taken = logits.gather(1, row[0, len(out.prompt_ids) :, None])[:, 0]
    gap = logits.amax(-1) - taken
    assert (gap <= 0.02 * logits.abs().amax(-1)).all()


def test_compiled_and_captured_it_gives_the_same_tokens_and_a_text_after_the_first_needs_no_new_graph():
    network, told = tiny_network().to("cuda"), []
    assert network.capture_graphs(told.append) is None
    for drafter in ("none", "sequential", "early_exit"):
        expected = generate(tiny_network().to("cuda"), PROMPTS[2], max_new_tokens=60)
        ours = drafter_for(network, drafter)
        found = [generate(network, PROMPTS[2], drafter=ours, max_new_tokens=60)[0].token_ids]
        before = graphs(network)
        found.append(generate(network, PROMPTS[2], drafter=ours, max_new_tokens=60)[0].token_ids)
        assert found == [expected[0].token_ids] * 2
        assert graphs(network) == before


def graphs(network) -> int:
    return sum(len(part.passes) for part in network.modules() if isinstance(part, CapturedLayer))


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_plain_decoding_waits_for_the_device_for_its_token_only(form):
    network = on_gpu(form)
    build = lambda: drafter_for(network, "none")  # noqa: E731
    assert waits(network, build, PROMPTS[2], 32)["per_step"] <= 1.1


def test_a_seed_repeats():
    network = tiny_network().to("cuda")
    options = {"drafter": "sequential", "sampling": Sampling(temperature=1.0), "max_new_tokens": 40}
    first = generate(network, PROMPTS, seed=3, **options)
    assert [out.token_ids for out in generate(network, PROMPTS, seed=3, **options)] == [
        out.token_ids for out in first
    ]
