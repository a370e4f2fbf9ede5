"""EAGLE's head: what it is fed, what it foretells, what it shares with the trunk."""

import torch

LENGTH = 9


@torch.no_grad()
def test_a_readout_sees_every_token_up_to_the_one_after_its_position_and_no_other(network):
    head, trunk = network.heads["eagle"], network.trunk
    row = torch.arange(7, 7 + LENGTH)
    changed = row.repeat(LENGTH, 1)
    changed[range(LENGTH), range(LENGTH)] += 20  # row j: another token at place j
    tokens = torch.cat([row[None], changed])
    states = trunk(tokens, taps=head.taps, logits=False).states
    (readout,) = head.readouts(trunk, tokens, states)
    change = (readout.hidden[1:] - readout.hidden[0]).abs().amax(-1)[:, :-1]  # [place j, position i]
    seen = torch.arange(LENGTH)[:, None] <= torch.arange(LENGTH - 1) + 1
    assert (change[seen] > 1e-4).all()
    assert (change[~seen] < 1e-5).all()
    assert (readout.name, readout.depth) == ("depth1", 1)


@torch.no_grad()
def test_the_feature_it_foretells_is_what_the_output_matrix_reads_of_the_next_position(network):
    head, trunk = network.heads["eagle"], network.trunk
    tokens = torch.arange(3, 9)[None]
    out = trunk(tokens, taps=head.taps)
    (readout,) = head.readouts(trunk, tokens, out.states)
    torch.testing.assert_close(trunk.lm_head(readout.feature[:, :-1]), out.logits[:, 1:])
    assert readout.matrix is None  # the trunk's own
