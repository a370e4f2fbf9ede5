"""Early exit keeps the trunk's tokens at every layer, and the trunk itself whatever happens."""

import pytest
import torch
from tiny import tiny_network, tiny_trunk
from trees import tree_steps

from decoding import generate
from decoding.drafters.early_exit import build
from mtp import Network, UserError
from mtp.checkpoint import build_head

PROMPT = [9, 8, 7, 1, 2, 3, 9, 8]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_every_exit_gives_plain_decodings_tokens_with_counts_of_its_own(network, num_draft_tokens):
    plain = generate(network, PROMPT, max_new_tokens=40)[0].token_ids
    accepted = set()
    for exit_layer in (1, 2, 3):
        drafter = build(network, exit_layer)
        out = generate(
            network, PROMPT, drafter=drafter, num_draft_tokens=num_draft_tokens, max_new_tokens=40
        )[0]
        assert out.token_ids == plain
        accepted.add(out.acceptance.accepted)
    assert len(accepted) > 1 or num_draft_tokens == 0


def test_without_a_layer_the_heads_own_exit_is_taken_and_without_a_head_half_of_the_layers():
    trunk = tiny_trunk(layers=4)
    assert build(Network(trunk)).exit_layer == 2
    assert (
        build(Network(trunk, {"early_exit": build_head("early_exit", trunk, exit_layer=3)})).exit_layer == 3
    )


@pytest.mark.parametrize("adapter", ["norm", 2])
def test_a_heads_adapter_drafts_at_its_own_exit_and_at_no_other(adapter):
    trunk = tiny_trunk()
    head = build_head("early_exit", trunk, exit_layer=2, adapter=adapter)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    network = Network(trunk, {"early_exit": head}).eval()
    for exit_layer, leave in ((2, lambda hidden: head.exit(trunk, hidden)), (3, trunk.norm)):
        for (text,), draft in tree_steps(network, build(network, exit_layer), [PROMPT]):
            row = torch.tensor([text + draft.tokens[0].tolist()])
            with torch.no_grad():
                state = trunk(row, taps=(exit_layer,)).states[exit_layer]
                best = trunk.lm_head(leave(state)).argmax(-1)[0, len(text) - 1 : -1]
            assert draft.tokens[0].tolist() == best.tolist()
    plain = generate(network, PROMPT, max_new_tokens=20)[0].token_ids
    assert generate(network, PROMPT, drafter="early_exit", max_new_tokens=20)[0].token_ids == plain


@pytest.mark.parametrize("exit_layer", [0, 4, 5, -1, 2.5, True, "2"])
def test_a_layer_that_is_none_is_refused_with_what_is_allowed(network, exit_layer):
    with pytest.raises(UserError, match=r"exit_layer=.* is not a whole number from 1 to 3"):
        build(network, exit_layer)


def test_a_trunk_of_one_layer_has_no_exit():
    with pytest.raises(UserError, match="exit_layer=0 is not a whole number from 1 to 0"):
        build(Network(tiny_trunk(layers=1)))


def test_after_a_decoding_that_broke_off_all_layers_are_back():
    network = tiny_network()
    plain = generate(network, PROMPT, max_new_tokens=20)[0].token_ids

    def breaking(emitted):
        raise KeyboardInterrupt

    drafter = build(network, 1)
    with pytest.raises(KeyboardInterrupt):
        generate(network, PROMPT, drafter=drafter, max_new_tokens=20, observe=breaking)
    assert network.trunk.num_layers == 4
    assert generate(network, PROMPT, max_new_tokens=20)[0].token_ids == plain
    assert generate(network, PROMPT, drafter=drafter, max_new_tokens=20)[0].token_ids == plain
