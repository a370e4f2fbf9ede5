"""Captured graphs: fixed buffers, padded nodes and shared memory, all but the capture itself, on a CPU.

In place of a CUDA graph stands one that calls the step again and, as graphs in one pool may, leaves its
result where it left it before and spoils those of all others.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from architectures import LAYERS, gives_all_back, trunk_of
from drafters import drafter_for
from tiny import tiny_network

import decode
from decoding import generate
from decoding.cache import KVCache
from decoding.generate import drafter_names
from mtp import Network, graphs
from mtp.fused import WIDTHS, Shared
from mtp.graph_memory import LEAST_SLOTS, Memory
from mtp.graphs import CapturedLayer, capture_modules, why_not
from mtp.trunk import ARCHITECTURES

CPU = torch.device("cpu")
CLOSE = {"atol": 2e-4, "rtol": 2e-4}
PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]
TOKENS = torch.tensor([[5, 9, 2, 9, 5, 7, 1, 3], [11, 4, 6, 0, 3, 3, 8, 2]])


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    results = []

    def capture(step, device, shared):
        result = step()
        results.append(result)

        def replay():
            new = step()
            for other in results:
                other.fill_(float("nan"))
            return result.copy_(new)

        return replay

    monkeypatch.setattr(graphs, "capture", capture)


def captured(network: Network) -> Network:
    capture_modules(network, network.trunk, None)
    return network


def passes(network: Network) -> int:
    """Graphs that there are."""
    return sum(len(part.passes) for part in network.modules() if isinstance(part, CapturedLayer))


def ids(network: Network, prompts=PROMPTS, **options) -> list[list[int]]:
    return [out.token_ids for out in generate(network, prompts, **{"max_new_tokens": 40} | options)]


@pytest.mark.parametrize("prompts", [PROMPTS[2:], PROMPTS], ids=["one", "three"])
@pytest.mark.parametrize("drafter", drafter_names())
def test_every_drafter_decodes_the_tokens_of_a_network_as_it_is(drafter, prompts):
    """Twice with one drafter: the second text finds the buffers of the first."""
    plain, network = tiny_network(), captured(tiny_network())
    expected = ids(plain, prompts)
    ours = drafter_for(network, drafter)
    assert ids(network, prompts, drafter=ours) == expected
    assert ids(network, prompts, drafter=ours) == expected
    assert passes(network) > 0


@pytest.mark.parametrize("width", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("parents", [None, "branches"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_states_logits_and_cache_are_those_of_the_architectures_own_layers(architecture, parents, width):
    trunks = trunk_of(architecture), trunk_of(architecture)
    captured(Network(trunks[1]))
    nodes = torch.randint(64, (2, width), generator=torch.Generator().manual_seed(3))
    tree = torch.tensor([[max(node - 2, 0) for node in range(width - 1)]] * 2).view(2, -1)
    outs, caches = [], []
    for trunk in trunks:
        cache = KVCache(2, CPU)
        window = cache.open(8)
        trunk(TOKENS, positions=window.positions, mask=window.mask, cache=cache)
        cache.commit(torch.arange(8) < torch.tensor([[8], [5]]))  # rows of different lengths
        window = cache.open(width, parents=tree if parents else None)
        taps = tuple(range(LAYERS + 1))
        outs.append(trunk(nodes, positions=window.positions, mask=window.mask, cache=cache, taps=taps))
        caches.append(cache)
    torch.testing.assert_close(outs[1].logits, outs[0].logits, **CLOSE)
    for tap, state in outs[0].states.items():
        torch.testing.assert_close(outs[1].states[tap], state, **CLOSE)
    for layer in range(LAYERS):
        for ours, theirs in zip(caches[1].layers[layer], caches[0].layers[layer], strict=True):
            for row, length in enumerate((8, 5)):
                end = length + width
                torch.testing.assert_close(ours[row, :, :end], theirs[row, :, :end], **CLOSE)


def test_greedy_decoding_says_what_transformers_says_beyond_the_first_buffers():
    network = Network(trunk_of("llama", max_position_embeddings=2 * LEAST_SLOTS))
    prompt = (TOKENS[:1].repeat(1, LEAST_SLOTS // 8))[:, : LEAST_SLOTS - 10]
    theirs = network.trunk.model.generate(
        prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
    )
    captured(network)
    found = ids(network, prompt.tolist(), drafter="ngram", max_new_tokens=20, eos_token_ids=())
    assert found == theirs[:, prompt.shape[1] :].tolist()
    assert {part.inputs.places.numel() for part in network.trunk.layers[0].passes.values()} == {
        LEAST_SLOTS, 2 * LEAST_SLOTS,
    }  # fmt: skip


def test_no_more_graphs_are_made_than_widths_however_long_it_goes_on():
    network = captured(tiny_network())
    for prompt, count in itertools.product(PROMPTS, range(6)):
        ids(network, [prompt], drafter="suffix", num_draft_tokens=count)
    assert {key[2] for key in network.trunk.layers[0].passes} <= set(WIDTHS)
    assert passes(network) <= len(WIDTHS)


def test_two_texts_at_once_do_not_share_their_keys():
    """One is stopped in the middle, with its cache alive, while another is decoded."""
    network = captured(tiny_network())
    expected = ids(tiny_network(), PROMPTS[:1]), ids(tiny_network(), PROMPTS[2:])
    inside = []

    def other(_):
        if not inside:
            inside.append(ids(network, PROMPTS[2:]))

    assert (ids(network, PROMPTS[:1], observe=other), inside[0]) == expected


def test_a_place_is_taken_over_from_a_cache_that_is_gone():
    memory, pair = Memory(), (torch.ones(1, 1, 8, 2), torch.ones(1, 1, 8, 2))
    first, second = KVCache(1, CPU), KVCache(1, CPU)
    held = memory.hold(0, pair, first)
    assert held[0] is not pair[0]
    assert memory.hold(0, held, first) is held
    assert memory.hold(0, pair, second)[0] is not held[0]
    held[0].fill_(float("nan"))
    del first
    again = memory.hold(0, pair, KVCache(1, CPU))
    assert again[0] is held[0]
    assert (again[0] == 1).all()


def test_unpacking_gives_every_module_and_weight_back():
    gives_all_back(tiny_network(tie_word_embeddings=True), captured, "captured")


def test_what_cannot_be_captured_says_why():
    assert (
        tiny_network().capture_graphs() == "graphs are captured on CUDA devices, and this network is on cpu"
    )
    gelu = tiny_network(hidden_act="gelu").trunk.config
    assert "this network has gelu" in (why_not(torch.device("cuda"), gelu) or "")
    assert why_not(torch.device("cuda"), tiny_network().trunk.config) is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_is_compiled_ahead_is_all_that_decoding_needs(architecture):
    """By inductor, for the CPU: two graphs a width, told one by one, and none while decoding."""
    plain, network = (Network(trunk_of(architecture, max_position_embeddings=256)) for _ in range(2))
    told: list[str] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    capture_modules(network, network.trunk, told.append)
    assert [line.split(" (")[0] for line in told] == [
        f"compiled the step for {width} token{'s' if width > 1 else ''}" for width in WIDTHS
    ]
    with torch.compiler.set_stance("fail_on_recompile"):
        found = ids(network, PROMPTS[:1], drafter="ngram", max_new_tokens=60)
    assert found == ids(plain, PROMPTS[:1], max_new_tokens=60)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * len(WIDTHS)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_where_compiling_fails_that_is_told_and_decoding_goes_on(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(Shared, "_compile", fails)
    network, told = tiny_network(), []
    capture_modules(network, network.trunk, told.append)
    assert told == ["not compiled, only captured (no compiler here)"]
    assert ids(network, PROMPTS[:1]) == ids(tiny_network(), PROMPTS[:1])


@pytest.mark.parametrize(("compile", "calls"), [("auto", 0), (False, 0), (True, 1)])
def test_the_command_line_captures_on_a_gpu_only_when_asked(compile, calls):
    asked: list[object] = []
    trunk = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, config=None)
    network = SimpleNamespace(
        trunk=trunk,
        capture_graphs=asked.append,
        compile_kernel=lambda: "not on a GPU",
        pack=lambda: "not on a GPU",
    )
    decode.shape(network, {"compile": compile, "packed": "auto"})
    assert len(asked) == calls


def test_counts_that_were_not_compiled_run_as_they_are():
    shared = Shared()
    shared.fused.add(4)
    assert shared.functions(4) is shared.compiled
    assert shared.functions(12) is not shared.compiled
