"""Automatic draft length: as long as it pays, none where nothing is accepted, the same text in any case."""

import pytest
from drafters import drafter_for

from decoding import generate
from decoding.draft_length import FIRST, AutoLength, Costs, FixedLength
from decoding.generate import drafter_names

PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]


def simulated(acceptance, slope, steps):
    """Lengths chosen when acceptance(step) tokens of a draft are good and each costs `slope` of a plain
    step."""
    policy = AutoLength(Costs())
    chosen = []
    for step in range(steps):
        length = policy.ask([0])[0]
        good = acceptance(step)
        policy.learn(0, min(length, good + 1), min(length, good))
        policy.took(length, 1.0 + slope * length)
        chosen.append(length)
    return chosen


def test_what_is_always_accepted_is_drafted_as_long_as_can_be():
    assert set(simulated(lambda step: 99, 0.05, 60)[30:]) == {AutoLength.most}


def test_what_is_never_accepted_is_not_drafted_but_for_rare_probes():
    chosen = simulated(lambda step: 0, 0.5, 500)
    assert sum(length > 0 for length in chosen) <= 10
    assert all(length <= 1 for length in chosen[3:])


def test_a_probe_notices_that_the_text_has_changed():
    chosen = simulated(lambda step: 0 if step < 100 else 99, 0.2, 400)
    assert chosen[-1] == AutoLength.most


def test_drafts_that_cost_more_than_they_bring_are_left():
    assert set(simulated(lambda step: 99, 3.0, 100)[20:]) <= {0, 1}


def test_two_accepted_of_every_draft_means_two_or_three_drafted():
    assert set(simulated(lambda step: 2, 0.2, 200)[100:]) <= {2, 3}


def test_first_length_is_measured_before_anything_is_known():
    assert simulated(lambda step: 0, 0.5, 2) == [FIRST, 0]


def test_every_row_has_its_own_record():
    policy = AutoLength(Costs())
    policy.took(FIRST, 1.9)
    policy.took(0, 1.0)
    for _ in range(20):
        policy.learn(0, 3, 3)
        policy.learn(1, 1, 0)
    good, bad = policy.ask([0, 1])
    assert good > 3
    assert bad == 0


@pytest.mark.parametrize("drafter", drafter_names())
def test_automatic_length_gives_plain_decodings_tokens(network, drafter):
    plain = [out.token_ids for out in generate(network, PROMPTS, max_new_tokens=30)]
    out = generate(
        network, PROMPTS, drafter=drafter_for(network, drafter), num_draft_tokens="auto", max_new_tokens=30
    )
    assert [row.token_ids for row in out] == plain


def test_a_fixed_length_is_fixed():
    assert FixedLength(4).ask([0, 1]) == [4, 4]
