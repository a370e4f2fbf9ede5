"""FLOPs, bytes and prices, counted by hand."""

import pytest
from drafters import tiny_draft
from tiny import tiny_network

from ablation.budget import equal_flops
from ablation.flops import cache_bytes, drafting, exits, extra_prefill, training_flops, trunk_flops
from ablation.prices import Parts, parts

# Of the tiny network: four layers, 32 wide, an MLP of 48, two heads of keys and values of 8, 64 symbols.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
OUTPUT = 64 * 32
STAGE = LAYER + 2 * 32 * 32  # a sequential module joins two states first


@pytest.fixture(scope="module")
def network():
    return tiny_network()


def test_the_trunk_is_its_layers_and_its_output_matrix(network):
    assert trunk_flops(network) == 2 * (4 * LAYER + OUTPUT)


@pytest.mark.parametrize(
    ("name", "layers", "output"),
    [
        ("parallel", LAYER, OUTPUT),
        ("sequential", STAGE, OUTPUT),
        ("early_exit", 2 * LAYER, OUTPUT),
        ("medusa", 0, 32 * 32 + OUTPUT),
        ("ngram", 0, 0),
        ("none", 0, 0),
    ],
)
def test_a_drafted_token_costs_its_layers_and_an_output_matrix(network, name, layers, output):
    work = drafting(network, name, {}, None)
    assert (work.layers, work.output) == (layers, output)
    assert work.flops == 2 * (layers + output)


def test_a_draft_model_costs_all_of_itself(network):
    draft = tiny_draft(network)
    layer = sum(p.numel() for p in draft.trunk.layers[0].parameters() if p.dim() > 1)
    work = drafting(network, "draft_model", {}, draft)
    assert work.layers == draft.trunk.num_layers * layer
    assert cache_bytes(network, "draft_model", draft, 4) > 0
    assert extra_prefill(network, "draft_model", draft, 4) == 2 * work.layers


def test_an_exit_that_a_drafter_names_counts(network):
    assert drafting(network, "early_exit", {"exit_layer": 3}, None).layers == 3 * LAYER


def test_caches_and_prefill_are_those_of_the_depths_that_are_drafted(network):
    layer = 2 * 2 * 8 * 4
    assert cache_bytes(network, "sequential", None, 3) == 3 * layer
    assert cache_bytes(network, "parallel", None, 9) == 4 * layer
    assert cache_bytes(network, "early_exit", None, 4) == cache_bytes(network, "ngram", None, 4) == 0
    assert extra_prefill(network, "sequential", None, 3) == 2 * 3 * STAGE
    assert extra_prefill(network, "early_exit", None, 3) == 0


def training(frozen=False, states=None, heads=(), **objective):
    objective = {"curriculum": "none", "rotation": 4} | objective
    return {
        "trunk": {"frozen": frozen}, "data": {"states": states}, "heads": {name: {} for name in heads},
        "objective": objective,
    }  # fmt: skip


def test_a_trained_trunk_takes_six_flops_a_weight(network):
    assert training_flops(network, training()) == 6 * (4 * LAYER + OUTPUT)


def test_heads_add_their_layers_and_the_output_matrix_at_every_depth(network):
    alone = training_flops(network, training())
    assert training_flops(network, training(heads=["sequential"])) - alone == 6 * 4 * (STAGE + OUTPUT)
    assert training_flops(network, training(heads=["parallel"])) - alone == 6 * 4 * (LAYER + OUTPUT)
    assert training_flops(network, training(heads=["early_exit"])) - alone == 6 * 3 * OUTPUT


def test_a_frozen_trunk_is_run_forward_or_read_from_the_disk(network):
    heads = 4 * (6 * LAYER + 4 * OUTPUT)
    assert training_flops(network, training(True, heads=["parallel"])) == 2 * 4 * LAYER + heads
    assert training_flops(network, training(True, "float16", ["parallel"])) == heads


def test_exits_that_take_turns_cost_in_turn(network):
    head = network.heads["early_exit"]
    told = [exits(head, {"curriculum": kind, "rotation": 3}) for kind in ("none", "rotational", "gradual")]
    assert told == [3, 1, 1.5]


def test_equal_flops_give_nobody_more_than_the_cheapest_has():
    flops = {"a": 30, "b": 47, "c": 20}
    steps = equal_flops(100, flops)
    assert steps["c"] == 100
    assert all(steps[name] * flops[name] <= 100 * 20 < (steps[name] + 1) * flops[name] for name in flops)


def test_a_price_is_the_weights_read(network):
    trunk = 4 * LAYER + OUTPUT
    found = {
        name: parts(network, name, drafting(network, name, {}, None)) for name in ("sequential", "parallel")
    }
    assert found["sequential"].price(3) == pytest.approx(1 + 3 * (STAGE + OUTPUT) / trunk)
    assert found["parallel"].price(3) == pytest.approx(1 + (3 * LAYER + OUTPUT) / trunk)


def test_a_deeper_trunk_makes_a_head_cheaper_and_leaves_an_exit_at_its_share():
    head, exit_ = Parts(8, 0.1, 1.0, 1.0), Parts(8, 0.1, 2.0, 1.0, shared=True)
    assert head.at(32).draft_cost(1) == pytest.approx(0.9 / 32 + 0.1)
    assert exit_.at(32).draft_cost(1) == pytest.approx(exit_.draft_cost(1))
