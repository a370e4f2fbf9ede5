"""What every head may see, what it is made of, and what it shares with the trunk."""

import pytest
import torch
from tiny import tiny_network, tiny_trunk
from torch import Tensor

from mtp import UserError
from mtp.block import Block, new_norm
from mtp.checkpoint import build_head

LENGTH = 10
SEEN_AHEAD = {"sequential": lambda depth: depth, "parallel": lambda depth: 0, "early_exit": lambda depth: 0}


@torch.no_grad()
def readouts(network, kind: str, tokens: Tensor):
    head = network.heads[kind]
    return list(head.readouts(network.trunk, tokens, network.trunk(tokens, taps=head.taps).states))


@pytest.mark.parametrize("kind", SEEN_AHEAD)
def test_a_readout_changes_with_every_token_it_may_see_and_with_no_other(network, kind):
    """Depth k at position i is about token i+1+k: of the tokens up to i+k a sequential module is fed all, the
    others only those up to i."""
    row = torch.arange(7, 7 + LENGTH)
    perturbed = row.repeat(LENGTH, 1)
    perturbed[range(LENGTH), range(LENGTH)] += 20  # row j: another token at place j
    for readout in readouts(network, kind, torch.cat([row[None], perturbed])):
        change = (readout.hidden[1:] - readout.hidden[0]).abs().amax(-1)  # [place j, position i]
        ahead = SEEN_AHEAD[kind](readout.depth)
        place, position = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        complete = position + readout.depth < LENGTH  # beyond, the row has no token to feed
        seen = place <= position + ahead
        assert (change[seen & complete] > 1e-4).all(), readout.name
        assert (change[~seen & complete] < 1e-5).all(), readout.name


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
def test_a_row_beyond_which_nothing_is_known_is_read_as_the_longer_row_is(network, kind):
    tokens = torch.arange(7, 7 + LENGTH)[None]
    for long, short in zip(
        readouts(network, kind, tokens), readouts(network, kind, tokens[:, :-2]), strict=True
    ):
        known = LENGTH - 2 - (long.depth if kind == "sequential" else 0)
        torch.testing.assert_close(long.hidden[:, :known], short.hidden[:, :known], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("sequential", [("depth1", 1), ("depth2", 2), ("depth3", 3), ("depth4", 4)]),
        ("parallel", [("depth1", 1), ("depth2", 2), ("depth3", 3), ("depth4", 4)]),
        ("early_exit", [("layer1", 0), ("layer2", 0), ("layer3", 0)]),
    ],
)
def test_readouts_are_named_and_know_their_depth(network, kind, names):
    found = readouts(network, kind, torch.ones(1, 3, dtype=torch.long))
    assert [(readout.name, readout.depth) for readout in found] == names


@pytest.mark.parametrize(("zeroed", "deaf_to"), [("first", "embedding"), ("second", "hidden")])
@torch.no_grad()
def test_the_projection_reads_the_embedding_first_and_the_hidden_state_second(zeroed, deaf_to):
    trunk = tiny_trunk()
    module, size = build_head("sequential", trunk).stages[0], trunk.hidden_size
    module.eh_proj.weight[:, slice(0, size) if zeroed == "first" else slice(size, None)] = 0
    torch.manual_seed(0)
    inputs = {"hidden": torch.randn(1, 5, size), "embedding": torch.randn(1, 5, size)}
    rotary = trunk.rotary(inputs["hidden"], torch.arange(5)[None])
    before = module(**inputs, rotary=rotary)
    for name in inputs:
        after = module(**inputs | {name: torch.randn(1, 5, size)}, rotary=rotary)
        assert torch.equal(before, after) == (name == deaf_to)


def test_beyond_its_depth_a_sequential_head_has_its_last_module(network):
    head = network.heads["sequential"]
    assert [head.stage(k) for k in range(1, 5)] == list(head.stages)
    assert head.stage(5) is head.stage(40) is head.stages[3]


@torch.no_grad()
def test_more_readouts_than_modules_apply_the_last_module_again(network):
    tokens = torch.arange(3, 11)[None]
    head, trunk = network.heads["sequential"], network.trunk
    states = trunk(tokens, taps=head.taps).states
    more = head.readouts(trunk, tokens, states, depth=6)
    assert [readout.depth for readout in more] == [1, 2, 3, 4, 5, 6]
    for usual, readout in zip(head.readouts(trunk, tokens, states), more, strict=False):
        assert torch.equal(usual.hidden, readout.hidden)


def test_every_depth_starts_differently(network):
    weights = [stage.eh_proj.weight for stage in network.heads["sequential"].stages]
    weights += [block.layer.mlp.up_proj.weight for block in network.heads["parallel"].blocks]
    first = {weight.flatten()[0].item() for weight in weights}
    assert len(first) == 8


@torch.no_grad()
def test_parallel_heads_share_the_trunks_norm_and_output_matrix():
    network = tiny_network()
    names = dict(network.heads["parallel"].named_parameters())
    assert all(name.startswith("blocks.") for name in names)
    size = (network.trunk.vocab_size, network.trunk.hidden_size)
    assert all(tuple(parameter.shape) != size for parameter in names.values())
    tokens = torch.ones(1, 4, dtype=torch.long)
    before = readouts(network, "parallel", tokens)
    network.trunk.model.model.norm.weight.mul_(2)
    for old, new in zip(before, readouts(network, "parallel", tokens), strict=True):
        torch.testing.assert_close(new.hidden, 2 * old.hidden)


@torch.no_grad()
def test_parallel_heads_read_the_state_before_the_last_layer(network):
    assert network.heads["parallel"].taps == (network.trunk.num_layers - 1,)
    assert build_head("parallel", network.trunk, tap=0).taps == (0,)
    tokens = torch.arange(3, 9)[None]
    trunk, head = network.trunk, network.heads["parallel"]
    state, _ = trunk.run(trunk.embed(tokens), 0, trunk.num_layers - 1)
    rotary = trunk.rotary(state, torch.arange(6)[None])
    for block, readout in zip(head.blocks, readouts(network, "parallel", tokens), strict=True):
        torch.testing.assert_close(trunk.norm(block(state, rotary)), readout.hidden)


@torch.no_grad()
def test_an_exit_is_the_trunks_norm_right_after_its_layers(network):
    tokens = torch.arange(3, 9)[None]
    states = network.trunk(tokens, taps=(1, 2, 3)).states
    for layer, readout in enumerate(readouts(network, "early_exit", tokens), start=1):
        assert torch.equal(readout.hidden, network.trunk.norm(states[layer]))
    assert not list(network.heads["early_exit"].parameters())


def test_the_default_exit_is_half_of_the_layers():
    assert build_head("early_exit", tiny_trunk(layers=4)).exit_layer == 2
    assert build_head("early_exit", tiny_trunk(layers=5)).exit_layer == 2
    assert build_head("early_exit", tiny_trunk(layers=5), exit_layer=4).exit_layer == 4


@pytest.mark.parametrize("exit_layer", [0, 4, 5, -1, 2.5, True, "2"])
def test_an_exit_outside_the_layers_is_refused_with_what_is_allowed(exit_layer):
    with pytest.raises(UserError, match=r"exit_layer=.* is not a whole number from 1 to 3"):
        build_head("early_exit", tiny_trunk(layers=4), exit_layer=exit_layer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sequential", {"depth": 0}),
        ("sequential", {"depth": 1.5}),
        ("parallel", {"depth": -1}),
        ("parallel", {"depth": True}),
        ("parallel", {"tap": 5}),
        ("parallel", {"tap": -1}),
        ("parallel", {"tap": "last"}),
    ],
)
def test_a_depth_or_tap_that_cannot_be_is_refused_by_its_name(kind, options):
    with pytest.raises(UserError, match=f"{kind} head: {next(iter(options))}="):
        build_head(kind, tiny_trunk(layers=4), **options)


@pytest.mark.parametrize("kind", ["medusae", "", "checkpoint", "no.such"])
def test_an_unknown_kind_of_head_is_refused(kind):
    with pytest.raises(UserError, match="is not a kind of head"):
        build_head(kind, tiny_trunk())


def test_a_new_block_begins_as_the_trunks_layers_did():
    trunk = tiny_trunk()
    layer = Block(trunk).layer
    assert type(layer) is type(trunk.layers[0])
    spread = torch.cat([p.flatten() for p in layer.parameters() if p.dim() == 2]).std()
    assert 0.28 < spread < 0.32  # initializer_range is 0.3
    assert all((p == 1).all() for p in layer.parameters() if p.dim() == 1)


def test_a_new_norm_on_a_frozen_trunk_can_be_trained():
    trunk = tiny_trunk().requires_grad_(False)
    assert new_norm(trunk).weight.requires_grad
    assert all(parameter.requires_grad for parameter in build_head("sequential", trunk).parameters())
