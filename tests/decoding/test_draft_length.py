"""Automatic draft length: as long as it pays, none where nothing is accepted, the same text in any case."""

import doctest

import pytest
from drafters import drafter_for
from hypothesis import given
from hypothesis import strategies as st

import decoding.draft_length
import decoding.experience
from decoding import Sampling, generate
from decoding.contest import Ours
from decoding.costs import LENGTHS, OF_DRAFTERS, calibrated, known
from decoding.draft_length import MORE_PATIENCE, PROBE_BOUNDS, PROBE_SHARE, AutoLength, Costs, FixedLength
from decoding.experience import CREDIT, LOSS, Experience, Record
from decoding.generate import drafter_names
from decoding.reach import counted
from decoding.rows import new_row

PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]


def costs_of(slope):
    costs = Costs()
    costs.add(0, 1.0)
    costs.add(16, 1.0 + 16 * slope)
    return costs


def simulated(acceptance, slope, steps, experience=None):
    """Lengths chosen when acceptance(step) tokens of a draft are good and each costs `slope` of a plain
    step."""
    policy = AutoLength(costs_of(slope), experience)
    chosen = []
    for step in range(steps):
        length = policy.ask([0])[0]
        good = acceptance(step)
        policy.learn(0, length, counted(min(length, good + 1), min(length, good)))
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
    policy.ask([0, 1])
    for _ in range(20):
        policy.learn(0, 3, [1.0, 1.0, 1.0])
        policy.learn(1, 1, [0.0])
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
    for _ in range(16):
        policy.learn(0, 2, [0.7, 0.35])
    assert policy.records[0].rates(2) == pytest.approx([0.7, 0.5], abs=0.1)


def test_steps_are_measured_once_for_every_verifier_and_number_of_rows(network):
    drafter = drafter_for(network, "suffix")
    for verifier, prompts in (("token", PROMPTS), ("token", PROMPTS), ("block", PROMPTS[:1])):
        generate(
            network, prompts, drafter=drafter, num_draft_tokens="auto", verifier=verifier, max_new_tokens=3
        )
    costs = OF_DRAFTERS[drafter].costs
    assert sorted(costs) == [("block", 1), ("token", 3)]
    assert all(set(one.times) == set(LENGTHS) for one in costs.values())


@pytest.mark.parametrize("name", ["suffix", "hybrid"])
def test_what_was_drafted_while_measuring_is_not_remembered(network, name):
    fixed, auto = drafter_for(network, name), drafter_for(network, name)
    rows = [new_row(network, network.trunk.device, (), 0, PROMPTS[2], Sampling(), 0, 9, ())]
    generate(network, PROMPTS[0], drafter=fixed, max_new_tokens=12)
    generate(network, PROMPTS[0], drafter=auto, max_new_tokens=12)
    calibrated(network, rows, auto, "token", known(network, auto))
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
    assert drafter not in OF_DRAFTERS


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.1, 0.3, 1.0])
def test_where_nothing_is_ever_accepted_drafting_stops_soon(slope):
    """In the first text it loses what it may; in others, where that is known, little, and asks ever more
    rarely."""
    experience = Experience()
    chosen = simulated(lambda step: 0, slope, 2000, experience)
    assert slope * sum(chosen[:128]) <= 128 * LOSS + CREDIT
    assert slope * sum(chosen) < 0.01 * 2000
    for _ in range(4):
        assert slope * sum(simulated(lambda step: 0, slope, 128, experience)) < 0.02 * 128
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
        length = policy.ask([0])[0]
        policy.learn(0, length, [0.9] * length)
    assert sorted(asked) == list(range(17))


def test_the_documented_examples_hold():
    assert doctest.testmod(decoding.draft_length).failed == 0
    assert doctest.testmod(decoding.experience).failed == 0


@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2, 0.5])
def test_drafting_comes_back_soon_after_it_has_begun_to_pay(slope):
    """A probe that was accepted is followed by another, not by as many plain steps as before it."""
    chosen = simulated(lambda step: 0 if step < 300 else 99, slope, 1000)
    pause = MORE_PATIENCE * max(PROBE_BOUNDS[0], round(slope / PROBE_SHARE))
    assert AutoLength.most in chosen[300 : 300 + pause + 20]


@pytest.mark.parametrize("slope", [0.1, 0.3, 0.5])
def test_one_bad_draft_says_little(slope):
    """Dear drafts are not given up because the first one was rejected: they go on as soon as one more can be
    afforded."""
    chosen = simulated(lambda step: 4 if step else 0, slope, 60)
    pause = 1 + max(0, round((slope * chosen[0] + slope - CREDIT) / LOSS))
    assert all(chosen[pause:])


@given(
    slope=st.sampled_from([0.02, 0.1, 0.3, 0.7, 1.5]),
    good=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=60), min_size=1, max_size=4),
)
def test_whatever_is_accepted_drafting_loses_no_more_than_it_may(slope, good):
    """At every moment of all texts together: steps cost what plain decoding would have cost, LOSS and
    CREDIT."""
    experience, spent, emitted = Experience(), 0.0, 0
    for text in good:
        policy = AutoLength(costs_of(slope), experience)
        for most in text:
            length = policy.ask([0])[0]
            reached = counted(min(length, most + 1), min(length, most))
            policy.learn(0, length, reached)
            spent, emitted = spent + 1 + slope * length, emitted + 1 + min(length, most)
            assert spent <= emitted * (1 + LOSS) + CREDIT + 1e-9


def test_what_plain_decoding_leaves_unspent_does_not_pile_up():
    """After a long text without drafts a bad drafter may lose no more than at first; after gains it may."""
    experience = Experience()
    experience.count(emitted=1000, cost=1000.0)
    assert experience.afforded(1) == CREDIT
    experience.count(emitted=1, cost=1.5)
    assert experience.afforded(1) == pytest.approx(CREDIT - 0.5 + LOSS)
    experience.count(emitted=8, cost=2.0)
    assert experience.afforded(1) > CREDIT


def test_rows_that_decode_together_have_a_credit_each():
    policy, rows, spent = AutoLength(costs_of(0.5)), [0, 1, 2], 0.0
    assert policy.ask(rows) == [2, 2, 2]
    for _ in range(20):
        for row, length in zip(rows, policy.ask(rows), strict=True):
            policy.learn(row, length, counted(min(length, 1), 0))
            spent += 0.5 * length
    assert 1.5 * CREDIT < spent <= 3 * (CREDIT + 20 * LOSS)


def test_a_text_starts_from_what_other_texts_taught():
    """A drafter that is never right is not tried as it was in the first text; one that is, at once."""
    bad, good = Experience(), Experience()
    first, second = (simulated(lambda step: 0, 0.03, 100, bad) for _ in range(2))
    assert sum(second) < sum(first) / 2
    simulated(lambda step: 99, 0.3, 100, good)
    assert AutoLength(costs_of(0.3), good).ask([0])[0] > 2 * AutoLength(costs_of(0.3)).ask([0])[0]


def test_short_texts_are_probed_too():
    """What was waited for goes on from text to text, so that a drafter which failed once is asked again."""
    experience, drafted = Experience(), []
    for text in range(20):
        good = 99 if text >= 4 else 0
        drafted.append(sum(simulated(lambda step, good=good: good, 0.7, 30, experience)))
    assert sum(drafted[2:4]) <= 1
    assert drafted[-1] > 30


def test_what_a_name_drafts_is_remembered_with_the_network(network):
    """A drafter of a name is built for every call."""
    options = {"drafter": "ngram", "num_draft_tokens": "auto", "max_new_tokens": 20}
    generate(network, PROMPTS[2], **options)
    found = known(network, "ngram")
    texts, costs = len(found.experience.records), dict(found.costs)
    generate(network, PROMPTS[2], **options)
    assert len(found.experience.records) == texts + 1
    assert found.costs == costs


def test_a_contest_learns_from_prompt_to_prompt_but_not_from_a_prompts_other_runs(network):
    ours = Ours("ngram", network, lambda: drafter_for(network, "ngram"), num_draft_tokens="auto")
    for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[2]):
        ours(prompt, 20)
    assert len(ours.before.records) == 1
    assert len(ours.known.experience.records) == 2
