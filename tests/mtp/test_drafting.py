"""A head drafts in one call what its modules say one by one; an early exit leaves the trunk's own bits.

Weights here stay what they are when they are quantized, but where the test is about what that changes.
"""

import copy
import dataclasses
import functools
import shutil

import pytest
import torch
from architectures import quantizable, trunk_of
from tiny import tiny_network, tiny_trunk

from decoding import Sampling, generate
from decoding.cache import KVCache
from decoding.generate import build_drafter
from mtp import Network
from mtp.checkpoint import build_head
from mtp.compiled_linear import MOST_TOKENS
from mtp.drafting import Columns, depths_of, picked
from mtp.exit_drafting import exit_of
from mtp.kernel import matrix_unit
from mtp.trunk import ARCHITECTURES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
CLOSE = {"atol": 5e-5, "rtol": 1e-4}
LENGTHS = {"one": [9], "equal": [9, 9], "ragged": [9, 5]}
TEXT = [5, 3, 9, 9, 1, 2, 7, 7, 30]
VARIANTS = [
    ("sequential", {}),
    ("sequential", {"depth": 2, "draft_vocab": [1, 5, 7, 9, 30, 63]}),
    ("parallel", {}),
    ("parallel", {"form": "causal", "draft_vocab": 20}),
]


@functools.lru_cache
def pair(index):
    return both(*VARIANTS[index])


def both(name, options, trunk=None):
    """A network with one head as it is, and compiled."""
    trunk = trunk or tiny_trunk()
    plain = quantizable(Network(trunk, {name: build_head(name, trunk, **options)}).eval())
    ours = copy.deepcopy(plain)
    assert ours.compile_kernel() is None
    return plain, ours


def columns_of(network, lengths, width, count, compiled):
    """Columns behind texts of these lengths, whose keys are random, and random states and tokens."""
    torch.manual_seed(0)
    trunk, rows = network.trunk, len(lengths)
    cache = KVCache(rows, torch.device("cpu"))
    config = trunk.config
    shape = (rows, config.num_key_value_heads, cache.capacity, config.head_dim)
    cache.layers = {depth: (torch.randn(shape), torch.randn(shape)) for depth in range(count)}
    cache.lengths = list(lengths)
    window = cache.open(width, causal=compiled)
    states = torch.randn(rows, width, trunk.hidden_size)
    line = torch.randint(0, 60, (rows, width + count + 1))
    read = torch.randint(0, width, (rows, 2))
    return Columns(states, line, 1, read, trunk.rotary(states, window.positions), window.mask, cache)


def one_by_one(network, head, columns, count):
    """States of the last depth, and the logits of all, by the head's own modules."""
    said, hidden = [], columns.states
    for depth in range(1, count + 1):
        if head.kind == "sequential":
            now = dataclasses.replace(columns, states=hidden, offset=depth)
            hidden, logits = head.step(network.trunk, depth, now)
        else:
            source = head.source(columns.states, hidden)
            hidden = head.run(depth, source, columns.rotary, columns.mask, columns.cache)
            logits = head.logits(network.trunk, depth, picked(hidden, columns.read))
        said.append(logits)
    return hidden, torch.stack(said)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@torch.inference_mode()
def test_all_depths_in_one_call_say_what_the_modules_say(variant, width, lengths):
    name, (plain, ours) = VARIANTS[variant][0], pair(variant)
    theirs = columns_of(plain, LENGTHS[lengths], width, 3, False)
    states, said = one_by_one(plain, plain.heads[name], theirs, 3)
    columns = columns_of(ours, LENGTHS[lengths], width, 3, True)
    kernel = depths_of(ours.trunk, ours.heads[name], columns.states)
    found, logits = kernel.logits(columns, 1, 3)
    torch.testing.assert_close(found, states, **CLOSE)
    torch.testing.assert_close(logits, said, **CLOSE)
    for depth in range(3):
        for mine, other in zip(columns.cache.layers[depth], theirs.cache.layers[depth], strict=True):
            torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [1, 5, 9, 200])
@pytest.mark.parametrize("name", ["sequential", "parallel"])
@torch.inference_mode()
def test_depths_of_which_all_weights_fit_tiles_take_any_number_of_columns(name, width, lengths):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.1}
    plain, ours = both(name, {}, trunk_of("llama", **sizes))
    states, said = one_by_one(
        plain, plain.heads[name], columns_of(plain, LENGTHS[lengths], width, 3, False), 3
    )
    columns = columns_of(ours, LENGTHS[lengths], width, 3, True)
    kernel = depths_of(ours.trunk, ours.heads[name], columns.states)
    assert (kernel is None) == (not matrix_unit() and len(LENGTHS[lengths]) * width > MOST_TOKENS)
    if kernel is None:
        return
    found, logits = kernel.logits(columns, 1, 3)
    torch.testing.assert_close(found, states, **CLOSE)
    torch.testing.assert_close(logits, said, **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_depths_of_any_architecture_say_what_the_modules_say(architecture):
    plain, ours = both("sequential", {}, trunk_of(architecture, attention_bias=True))
    states, said = one_by_one(plain, plain.heads["sequential"], columns_of(plain, [9, 5], 3, 3, False), 3)
    columns = columns_of(ours, [9, 5], 3, 3, True)
    found, logits = depths_of(ours.trunk, ours.heads["sequential"], columns.states).logits(columns, 1, 3)
    torch.testing.assert_close(found, states, **CLOSE)
    torch.testing.assert_close(logits, said, **CLOSE)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@torch.inference_mode()
def test_greedy_depths_feed_on_the_best_tokens_of_those_before(variant, lengths):
    """Depth 4 of two modules is the last of them again."""
    name, ours, last = VARIANTS[variant][0], pair(variant)[1], torch.tensor([[2]] * len(LENGTHS[lengths]))
    columns = dataclasses.replace(columns_of(ours, LENGTHS[lengths], 3, 4, True), read=last)
    kernel = depths_of(ours.trunk, ours.heads[name], columns.states)
    hidden, line = columns.states, columns.line
    tokens = kernel.greedy(columns, 4)
    line[:, 4:7] = tokens[:, :3]
    said = kernel.logits(columns, 1, 4)[1][:, :, 0]
    assert torch.equal(said.argmax(-1).T, tokens)
    for depth in range(1, 5) if name == "sequential" else ():
        hidden, logits = kernel.logits(dataclasses.replace(columns, states=hidden, offset=depth), depth)
        assert torch.equal(logits[0, :, 0].argmax(-1), tokens[:, depth - 1])


@torch.inference_mode()
def test_of_equal_best_tokens_the_first_is_drafted():
    ours = both("parallel", {})[1]
    columns = columns_of(ours, [9], 3, 1, True)
    kernel = depths_of(ours.trunk, ours.heads["parallel"], columns.states)
    kernel.output.quantized.weight.copy_(kernel.output.quantized.weight[7].clone())
    kernel.output.quantized.weight[:5] = -kernel.output.quantized.weight[7]
    logits = kernel.logits(columns, 1)[1][0, 0, 0]
    tokens = kernel.greedy(dataclasses.replace(columns, read=columns.read[:, :1]), 1)
    assert tokens.item() == (5 if logits[7] > 0 else 0)


@torch.inference_mode()
def test_quantizing_moves_logits_a_little_only():
    network = tiny_network()
    ours = copy.deepcopy(network)
    assert ours.compile_kernel() is None
    states, said = one_by_one(network, network.heads["sequential"], columns_of(network, [9], 7, 1, False), 1)
    columns = columns_of(ours, [9], 7, 1, True)
    kernel = depths_of(ours.trunk, ours.heads["sequential"], columns.states)
    found, logits = kernel.logits(columns, 1, 1)
    assert 0 < (logits - said).std() < 0.03 * said.std()
    assert 0 < (found - states).std() < 0.03 * states.std()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("above", [(), (3,), (2, 4)])
@torch.inference_mode()
def test_an_early_exit_in_one_call_leaves_the_trunks_own_bits(lengths, above):
    """Token by token through `Trunk.run`, which scores too: same states, same keys, the same tokens."""
    trunk = quantizable(Network(tiny_trunk(layers=5))).trunk
    assert Network(trunk).compile_kernel() is None
    rows, count, below = len(LENGTHS[lengths]), 3, 2
    caches = []
    for _ in range(2):
        cache = KVCache(rows, torch.device("cpu"))
        text = torch.arange(rows * 9).view(rows, 9)
        window = cache.open(9)
        trunk(text, positions=window.positions, mask=window.mask, cache=cache)
        cache.commit(torch.arange(9) < torch.tensor(LENGTHS[lengths])[:, None])
        caches.append(cache)
    root = torch.tensor([7, 8][:rows])
    window = caches[0].open(count + 1, causal=True)
    kernel = exit_of(trunk, below, above, trunk.model.model.norm, rows)
    tokens, states = kernel.greedy(root, count, window, caches[0])
    fed = root
    for node in range(count + 1):
        window = caches[1].open(1, first=node)
        options = {"positions": window.positions, "mask": window.mask, "cache": caches[1]}
        hidden, _ = trunk.run(trunk.embed(fed[:, None]), 0, below, **options)
        assert torch.equal(states[:, node : node + 1], hidden)
        for layer in above if node < count else ():
            hidden, _ = trunk.run(hidden, layer, layer + 1, **options)
        if node < count:
            fed = trunk.unembed(hidden)[:, 0].argmax(-1)
            assert torch.equal(tokens[:, node], fed)
    for layer in caches[0].layers:
        for mine, other in zip(caches[0].layers[layer], caches[1].layers[layer], strict=True):
            for row, length in enumerate(LENGTHS[lengths]):
                assert torch.equal(mine[row, :, : length + count], other[row, :, : length + count])


GREEDY, WARM, RULED = Sampling(), Sampling(temperature=1.0), Sampling(repetition_penalty=1.3)
DECODED = [
    ("sequential", {}), ("sequential", {"widths": [2, 2, 1]}), ("sequential", {"tree_nodes": 8}),
    ("parallel", {}), ("parallel", {"widths": [2, 1, 2]}), ("early_exit", {}), ("layer_skip", {"skip": [2]}),
    ("hybrid", {"head": "sequential"}), ("hybrid", {"head": "early_exit"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "sampling"),
    [(*one, sampling) for one in DECODED for sampling in (GREEDY, WARM)]
    + [("sequential", {}, RULED), ("early_exit", {}, RULED)],
)
def test_a_compiled_network_drafts_what_it_drafted_before(name, options, sampling):
    """Rows of all lengths, alone and together; the counts agree, so each draft was as good as before."""
    network = quantizable(tiny_network())
    prompts = [TEXT, TEXT[:1], TEXT[4:]]

    def runs():
        drafter = build_drafter(network, name, **options)
        return [
            (out.token_ids, out.acceptance)
            for texts in (prompts, prompts[:1])
            for out in generate(network, texts, drafter=drafter, sampling=sampling, max_new_tokens=12, seed=3)
        ]

    before = runs()
    assert network.compile_kernel() is None
    assert runs() == before


def test_what_was_made_for_a_compiled_network_goes_with_that_form():
    network = quantizable(tiny_network())
    drafter = build_drafter(network, "sequential")
    run = lambda: generate(network, TEXT, drafter=drafter, max_new_tokens=12)[0].token_ids  # noqa: E731
    before, head, states = run(), network.heads["sequential"], torch.zeros(1, 1, 32)
    for _ in range(2):
        assert depths_of(network.trunk, head, states) is None
        assert network.compile_kernel() is None
        assert depths_of(network.trunk, head, states) is not None
        assert run() == before
        network.unpack()
    assert run() == before


@pytest.mark.parametrize("name", ["sequential", "parallel", "early_exit", "layer_skip"])
def test_a_drafter_is_ready_before_it_gets_a_text(name):
    """What is quantized once is no part of any text's seconds."""
    network = quantizable(tiny_network())
    assert network.compile_kernel() is None
    drafter = build_drafter(network, name)
    made = network.trunk.model.lm_head.made
    stages = lambda: [len(kept[1].stages) for key, kept in made.items() if key[0] == "depths"]  # noqa: E731
    ready, quantized = stages(), {key for key in made if key != "scorer"}
    assert quantized
    generate(network, TEXT, drafter=drafter, max_new_tokens=20)
    assert stages() == ready
    assert {key for key in made if key != "scorer"} == quantized


def test_more_rows_than_the_kernel_is_for_go_through_the_modules():
    network = quantizable(tiny_network())
    options = {"drafter": "sequential", "max_new_tokens": 6}
    before = [out.token_ids for out in generate(network, [TEXT] * 40, **options)]
    assert network.compile_kernel() is None
    head, states = network.heads["sequential"], torch.zeros(40, 4, network.trunk.hidden_size)
    assert depths_of(network.trunk, head, states) is None
    assert depths_of(network.trunk, head, states[:32]) is not None
    for width, known in ((128, True), (129, False)):
        assert (depths_of(network.trunk, head, torch.zeros(1, width, 32)) is not None) == known
    norm = network.trunk.model.model.norm
    assert [exit_of(network.trunk, 2, (), norm, batch) is None for batch in (1, 129)] == [False, True]
    found = generate(network, [TEXT] * 40, **options)
    assert [out.token_ids for out in found] == before


@pytest.mark.parametrize(
    ("name", "options"), [("parallel", {"form": "linear"}), ("early_exit", {"exit_layer": 2, "adapter": 4})]
)
def test_heads_that_the_kernel_does_not_know_draft_as_before(name, options):
    plain, ours = both(name, options)
    one, two = (generate(network, [TEXT], drafter=name, max_new_tokens=20)[0] for network in (plain, ours))
    assert (one.token_ids, one.acceptance) == (two.token_ids, two.acceptance)
    if name == "parallel":
        assert depths_of(ours.trunk, ours.heads[name], torch.zeros(1, 1, 32)) is None
