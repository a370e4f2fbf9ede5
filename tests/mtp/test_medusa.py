"""Medusa's heads: the trunk's own prediction at first, matrices of their own, one position seen."""

import pytest
import torch
from tiny import tiny_network, tiny_trunk

from mtp import Network, UserError
from mtp.checkpoint import build_head


@torch.no_grad()
def test_a_new_head_says_what_the_trunk_says_of_the_next_token():
    trunk = tiny_trunk().requires_grad_(False)
    head, tokens = build_head("medusa", trunk, depth=3, layers=2), torch.arange(5, 12)[None]
    out = trunk(tokens, taps=head.taps)
    for readout in head.readouts(trunk, tokens, out.states):
        torch.testing.assert_close(readout.hidden @ readout.matrix.T, out.logits)
    assert all(parameter.requires_grad for parameter in head.parameters())


@torch.no_grad()
def test_its_matrices_are_its_own_and_not_the_trunks():
    trunk = tiny_trunk(tie_word_embeddings=True)
    head = build_head("medusa", trunk)
    kept = trunk.model.lm_head.weight.clone()
    for one in head.heads:
        one.lm_head.weight.zero_()
    assert torch.equal(trunk.model.lm_head.weight, kept)


@torch.no_grad()
def test_a_readout_sees_the_trunks_state_at_its_own_position_only(network):
    tokens = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    head = network.heads["medusa"]
    states = network.trunk(tokens, taps=head.taps, logits=False).states
    other = {tap: state.clone() for tap, state in states.items()}
    other[head.taps[0]][:, 4] += 1
    for one, two in zip(
        head.readouts(network.trunk, tokens, states), head.readouts(network.trunk, tokens, other), strict=True
    ):
        assert (one.hidden != two.hidden).any(-1)[0].tolist() == [place == 4 for place in range(9)]


@torch.no_grad()
def test_drafting_reads_what_training_reads(network):
    tokens = torch.arange(3, 9)[None]
    head = network.heads["medusa"]
    states = network.trunk(tokens, taps=head.taps, logits=False).states
    for readout in head.readouts(network.trunk, tokens, states):
        said = head.logits(readout.depth, states[head.taps[0]][:, -1])
        torch.testing.assert_close(said, readout.hidden[:, -1] @ readout.matrix.T)


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": True}, {"layers": -1}, {"layers": 1.5}])
def test_a_depth_or_number_of_layers_that_cannot_be_is_refused(options):
    with pytest.raises(UserError, match=f"medusa head: {next(iter(options))}="):
        build_head("medusa", tiny_trunk(), **options)


def test_medusa_and_eagle_heads_come_back_from_disk_bit_for_bit(tmp_path):
    network = tiny_network()
    network.save_pretrained(tmp_path)
    again = Network.from_pretrained(tmp_path)
    for kind in ("medusa", "eagle"):
        assert again.heads[kind].options == network.heads[kind].options
        for name, value in network.heads[kind].state_dict().items():
            assert torch.equal(value, again.heads[kind].state_dict()[name]), name
