"""A reduced vocabulary for drafting: which tokens, how they are stored, and what is never drafted."""

import doctest
import json

import pytest
import torch
from tiny import tiny_trunk

from mtp import Network, UserError, draft_vocab, eagle
from mtp.checkpoint import build_head
from mtp.draft_vocab import keep_frequent, read_out

KINDS = ("sequential", "parallel", "eagle")


@pytest.mark.parametrize("documented", [draft_vocab, eagle], ids=lambda module: module.__name__)
def test_the_worked_examples_are_right(documented):
    assert doctest.testmod(documented, extraglobs={"torch": torch}).failed == 0


@torch.no_grad()
def test_logits_are_the_trunks_inside_and_minus_infinity_outside():
    trunk = tiny_trunk()
    hidden, ids = torch.randn(2, 3, trunk.hidden_size), torch.tensor([3, 8, 60])
    found = read_out(trunk, hidden, ids)
    torch.testing.assert_close(found[..., ids], trunk.lm_head(hidden)[..., ids])
    assert (found.isfinite().sum(-1) == 3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_lie_beside_the_weights_and_come_back_whole(kind, tmp_path):
    """In bfloat16 an id above 256 would come back as another."""
    trunk = tiny_trunk(vocab_size=700)
    head = build_head(kind, trunk, draft_vocab=3)
    counts = torch.zeros(700, dtype=torch.long)
    counts[[257, 513, 699]] = torch.tensor([5, 9, 7])
    keep_frequent(head, counts)
    Network(trunk, {kind: head}).save_pretrained(tmp_path, dtype=torch.bfloat16)
    again = Network.from_pretrained(tmp_path).heads[kind]
    assert again.draft_ids.tolist() == [257, 513, 699]
    assert json.loads((tmp_path / "heads" / kind / "config.json").read_text())["options"]["draft_vocab"] == 3


def test_ids_that_were_given_stay():
    head = build_head("parallel", tiny_trunk(), draft_vocab=[9, 2])
    keep_frequent(head, torch.arange(64))
    assert head.draft_ids.tolist() == [2, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_without_one_nothing_is_stored(kind):
    head = build_head(kind, tiny_trunk())
    assert head.draft_ids is None
    assert "draft_ids" not in head.state_dict()


@pytest.mark.parametrize("value", [0, 65, True, 2.5, [], [1, 1], [64], [-1], "3"])
def test_a_draft_vocabulary_that_cannot_be_is_refused(value):
    with pytest.raises(UserError, match="parallel head: draft_vocab"):
        build_head("parallel", tiny_trunk(), draft_vocab=value)


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("sequential", {"depth": 2, "repeat": 1}, "repeat=1 is not a whole number of at least 2"),
        ("parallel", {"form": "diagonal"}, "form='diagonal' is not one of parallel, causal, linear"),
        ("eagle", {"rollout": 0}, "rollout=0 is not a whole number of at least 1"),
        ("early_exit", {"adapter": "lora"}, "adapter='lora' is not null, norm or a rank"),
        ("early_exit", {"adapter": 0}, "adapter=0 is not a whole number from 1 to 32"),
        ("early_exit", {"adapter": True}, "adapter=True"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(kind, options, line):
    with pytest.raises(UserError, match=line):
        build_head(kind, tiny_trunk(), **options)
