"""The promised speed: the ledger's expectation, priced part by part."""

import pytest
from tiny import chain_network

from decoding import Sampling, generate
from decoding.contest import maker
from decoding.draft_length import Costs
from decoding.replay import Text
from decoding.theory import Parts, drafting, head_prices, prices, promise, scoring, upper_passes

PROMPT = [1, 2, 3, 4, 5]
SUCCESSORS = [*range(1, 20), 0]


@pytest.fixture(scope="module")
def perfect():
    """A network that counts, and heads that know it."""
    return chain_network(SUCCESSORS)


def written(network, size=24):
    done = generate(network, PROMPT, max_new_tokens=size)[0]
    return Text(PROMPT, done.token_ids, Sampling(), size)


def asked(network, name, lengths, steps, **options):
    build = maker(network, name, options)
    return promise(network, [written(network)], build, steps, lengths=lengths, eos_token_ids=())


def test_a_drafter_that_is_always_right_is_promised_the_tokens_of_a_step_by_its_price(perfect):
    found = asked(perfect, "sequential", [3], [1.0, 1.2, 1.4, 1.6])
    assert found.tau == pytest.approx(4.0)
    assert found.speedup == pytest.approx(4.0 / 1.6)


def test_of_several_lengths_the_best_is_promised_and_drafting_nothing_is_one(perfect):
    cheap, dear = [1.0 + 0.01 * n for n in range(5)], [1.0 + 2.0 * n for n in range(5)]
    assert asked(perfect, "sequential", range(5), cheap).num_draft_tokens == 4
    found = asked(perfect, "sequential", range(5), dear)
    assert (found.num_draft_tokens, found.tau, found.speedup) == (0, 1.0, 1.0)


def test_a_lookup_pays_only_for_what_it_finds(perfect):
    found = asked(perfect, "ngram", [2], [1.0, 3.0, 3.0])
    assert found.tau / 3 < found.speedup < found.tau  # at first there is nothing to find


def test_a_drafter_that_remembers_is_new_for_every_few_texts(perfect, monkeypatch):
    monkeypatch.setattr("decoding.theory.TOGETHER", 1)
    build = maker(perfect, "suffix", {})
    one = promise(perfect, [written(perfect)], build, [1.0] * 5, lengths=[4], eos_token_ids=())
    two = promise(perfect, [written(perfect)] * 2, build, [1.0] * 5, lengths=[4], eos_token_ids=())
    assert one.tau == two.tau


def test_trees_are_promised_nothing(network):
    build = maker(network, "medusa", {"widths": [2, 2]})
    text = Text(PROMPT, [3, 4, 5], Sampling(), 3)
    assert promise(network, [text], build, [1.0] * 3, lengths=[2], eos_token_ids=()) is None


def test_without_texts_nothing_is_promised_but_plain_decoding(perfect):
    build = maker(perfect, "ngram", {})
    assert promise(perfect, [], build, [1.0] * 3, lengths=[2], eos_token_ids=()) is None
    assert promise(perfect, [], build, [1.0] * 3, lengths=[0, 2], eos_token_ids=()).speedup == 1.0


def test_the_layers_above_an_exit_are_timed_by_width(network):
    found = upper_passes(network, PROMPT, 2, widths=(1, 3))
    assert set(found) == {1, 3}
    assert all(seconds > 0 for seconds in found.values())


def test_a_step_of_an_early_exit_is_priced_by_its_passes():
    """A drafted token, a pass below and an output head, is 3 seconds, and the drafter's calls 1 beside them;
    a plain step takes 5, with one pass below, so a step that drafts has the call's and n more of them."""
    found = Parts(drafting={1: 7.0, 2: 10.0}, upper={1: 2.0, 2: 3.0, 3: 4.0})
    assert found.prices(2, plain=5.0) == [1.0, (5 + 1 + 3 + 1) / 5, (5 + 1 + 6 + 2) / 5]


def test_a_step_of_a_head_is_priced_by_its_drafts_and_its_width():
    costs = Costs()
    for drafted, seconds in ((0, 2.0), (1, 2.5), (4, 4.0)):
        costs.add(drafted, seconds)
    assert head_prices(costs, 0.5, 4)[1] == (0.5 + 2.5) / 2
    assert head_prices(costs, 0.5, 4)[4] == (4 * 0.5 + 4.0) / 2


def test_costs_are_measured_for_every_width_and_drafter(network):
    text = Text(PROMPT, [], Sampling(), 16)
    scored = scoring(network, text, widths=(1, 2, 4))
    assert sorted(scored.times) == [0, 1, 3]
    assert drafting(network, text, maker(network, "sequential", {}), 3) > 0
    found = prices(network, text, maker(network, "parallel", {}), scored, 2, 4)
    assert found["c"] > 0
    assert len(found["prices"]) == 5
    assert "parts" in prices(network, text, maker(network, "early_exit", {}), scored, 2, 4)
