"""Automatic draft length: as long as it pays, none where nothing is accepted, the same text in any case."""

import doctest

import pytest
from drafters import drafter_for

import decoding.draft_length
from decoding import Sampling, generate
from decoding.costs import LENGTHS, MEASURED, calibrated
from decoding.draft_length import AutoLength, Costs, FixedLength, Record
from decoding.generate import drafter_names
from decoding.reach import counted
from decoding.rows import new_row

PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]


def costs_of(slope):
    costs = Costs()
    costs.add(0, 1.0)
    costs.add(16, 1.0 + 16 * slope)
    return costs


def simulated(acceptance, slope, steps):
    """Lengths chosen when acceptance(step) tokens of a draft are good and each costs `slope` of a plain
    step."""
    policy = AutoLength(costs_of(slope))
    chosen = []
    for step in range(steps):
        length = policy.ask([0])[0]
        good = acceptance(step)
        policy.learn(0, counted(min(length, good + 1), min(length, good)))
        chosen.append(length)
    return chosen


def test_what_is_always_accepted_is_drafted_as_long_as_can_be():
    assert set(simulated(lambda step: 99, 0.05, 60)[30:]) == {AutoLength.most}


def test_what_is_never_accepted_is_not_drafted_but_for_rare_probes():
    chosen = simulated(lambda step: 0, 0.5, 500)
    assert sum(length > 0 for length in chosen) <= 10
    assert all(length <= 1 for length in chosen[1:])


def test_a_probe_notices_that_the_text_has_changed():
    chosen = simulated(lambda step: 0 if step < 100 else 99, 0.2, 400)
    assert chosen[-1] == AutoLength.most


def test_drafts_that_cost_more_than_they_bring_are_left():
    assert set(simulated(lambda step: 99, 3.0, 100)[20:]) <= {0, 1}


def test_two_accepted_of_every_draft_means_two_or_three_drafted():
    assert set(simulated(lambda step: 2, 0.2, 200)[100:]) <= {2, 3}


def test_every_row_has_its_own_record():
    policy = AutoLength(costs_of(0.3))
    for _ in range(20):
        policy.learn(0, [1.0, 1.0, 1.0])
        policy.learn(1, [0.0])
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


def test_chances_say_in_a_few_steps_what_outcomes_say_in_many():
    policy = AutoLength(costs_of(0.3))
    for _ in range(8):
        policy.learn(0, [0.7, 0.35])
    assert policy.records[0].rates(2) == pytest.approx([0.7, 0.5], abs=0.1)


def test_steps_are_measured_once_for_every_verifier_and_number_of_rows(network):
    drafter = drafter_for(network, "suffix")
    for verifier, prompts in (("token", PROMPTS), ("token", PROMPTS), ("block", PROMPTS[:1])):
        generate(
            network, prompts, drafter=drafter, num_draft_tokens="auto", verifier=verifier, max_new_tokens=3
        )
    assert sorted(MEASURED[drafter]) == [("block", 1), ("token", 3)]
    assert all(sorted(costs.times) == sorted(LENGTHS) for costs in MEASURED[drafter].values())


@pytest.mark.parametrize("name", ["suffix", "hybrid"])
def test_what_was_drafted_while_measuring_is_not_remembered(network, name):
    fixed, auto = drafter_for(network, name), drafter_for(network, name)
    rows = [new_row(network, network.trunk.device, (), 0, PROMPTS[2], Sampling(), 0, 9, ())]
    generate(network, PROMPTS[0], drafter=fixed, max_new_tokens=12)
    generate(network, PROMPTS[0], drafter=auto, max_new_tokens=12)
    calibrated(network, rows, auto, "token")
    for drafter in (fixed, auto):
        drafter.reset(1, None)
    lookups = [getattr(drafter, "lookup", drafter) for drafter in (fixed, auto)]
    assert [index.size for index in lookups[0].earlier] == [index.size for index in lookups[1].earlier]


def test_nothing_is_measured_where_nothing_is_to_decode(network):
    drafter = drafter_for(network, "ngram")
    assert (
        generate(network, [1, 2], drafter=drafter, num_draft_tokens="auto", max_new_tokens=0)[0].token_ids
        == []
    )
    assert drafter not in MEASURED


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.1, 0.3, 1.0])
def test_where_nothing_is_ever_accepted_drafting_costs_less_than_three_percent(slope):
    """Of 128 tokens, and of 2,000: it stops soon and asks again ever more rarely."""
    chosen = simulated(lambda step: 0, slope, 2000)
    for steps in (128, 2000):
        assert slope * sum(chosen[:steps]) < 0.03 * steps
    assert sum(length > 0 for length in chosen[1000:]) <= 1000 // 32 + 1


def test_a_plain_step_estimates_nothing(monkeypatch):
    """What a policy does in a step is time that plain decoding does not spend."""
    calls, rates = [], Record.rates
    monkeypatch.setattr(Record, "rates", lambda *arguments: calls.append(0) or rates(*arguments))
    chosen = simulated(lambda step: 0, 0.3, 500)
    assert len(calls) <= 2 * sum(length > 0 for length in chosen) + 2


def test_costs_are_looked_up_once():
    asked = []

    class Asked(Costs):
        def __call__(self, drafted):
            asked.append(drafted)
            return super().__call__(drafted)

    costs = Asked()
    costs.add(0, 1.0)
    costs.add(16, 2.0)
    policy = AutoLength(costs)
    for _ in range(100):
        policy.learn(0, [0.9] * policy.ask([0])[0])
    assert sorted(asked) == list(range(17))


def test_the_documented_examples_hold():
    assert doctest.testmod(decoding.draft_length).failed == 0


@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2, 0.5])
def test_drafting_comes_back_soon_after_it_has_begun_to_pay(slope):
    """A probe that was accepted is followed by another, not by as many plain steps as before it."""
    chosen = simulated(lambda step: 0 if step < 300 else 99, slope, 600)
    pause = 4 * max(8, round(100 * slope))
    assert AutoLength.most in chosen[300 : 300 + pause + 20]


@pytest.mark.parametrize("slope", [0.1, 0.3, 0.5])
def test_one_bad_draft_says_little(slope):
    """Dear drafts are not given up for many steps because the first one was rejected."""
    chosen = simulated(lambda step: 4 if step else 0, slope, 20)
    assert all(chosen)
