"""Counts say what was verified and emitted, no more: they end where the output ends."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import chain_network

from decoding import Acceptance, generate
from decoding.acceptance import total
from decoding.report import document, repeated_4grams, summary

CHAIN = {5: 6, 6: 7, 7: 2, 2: 9, 9: 10, 10: 11, 11: 5}
SUCCESSORS = [CHAIN.get(token, token) for token in range(12)]
PROMPT = [5, 6, 7, 2, 9, 10, 11, 5]

step = st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans(), st.integers(1, 7))


def counted(steps):
    """Drafted, then accepted of them, then whether the next was rejected, then how many tokens were used."""
    acceptance = Acceptance()
    for drafted, accepted, rejected, used in steps:
        accepted = min(accepted, drafted)
        tested = accepted + (rejected and accepted < drafted)
        acceptance.count(drafted=drafted, tested=tested, accepted=accepted, emitted=min(used, accepted + 1))
    return acceptance


@pytest.mark.parametrize("drafter", ["ngram", "sequential", "early_exit"])
def test_case_25_tokens_accepted_behind_an_eos_are_not_counted(drafter):
    out = generate(
        chain_network(SUCCESSORS), PROMPT, drafter=drafter, num_draft_tokens=5, max_new_tokens=20,
        eos_token_ids=2,
    )[0]  # fmt: skip
    a = out.acceptance
    assert (a.steps, a.emitted, a.tau) == (1, 3, 3.0)
    assert (a.drafted, a.tested, a.accepted, a.alpha) == (5, 3, 3, 1.0)
    assert a.tested_at_depth == a.accepted_at_depth == [1, 1, 1]


@pytest.mark.parametrize("drafter", ["ngram", "sequential", "parallel", "early_exit"])
def test_a_limit_below_the_draft_length_drafts_only_what_can_be_of_use(drafter):
    out = generate(chain_network(SUCCESSORS), PROMPT, drafter=drafter, num_draft_tokens=8, max_new_tokens=3)[
        0
    ]
    a = out.acceptance
    assert (a.steps, a.emitted, a.drafted, a.tested, a.accepted) == (1, 3, 2, 2, 2)


def test_where_nothing_was_drafted_there_is_no_rate_and_no_nan():
    network = chain_network([*range(1, 30), 0])
    out = generate(network, [0, 1, 2], drafter="ngram", max_new_tokens=10)
    assert (out[0].acceptance.alpha, out[0].acceptance.conditional) == (None, [])
    assert out[0].acceptance.tau == 1
    assert "τ 1.00, α n/a" in summary(out)
    json.dumps(document(out, out, True), allow_nan=False)


def test_where_nothing_was_emitted_there_is_no_tau_and_no_nan():
    out = generate(chain_network(SUCCESSORS), PROMPT, max_new_tokens=0)
    assert (out[0].token_ids, out[0].acceptance.tau, out[0].acceptance.steps) == ([], None, 0)
    assert summary(out).startswith("0 tokens in 0 steps, τ n/a, α n/a, 0.0 tokens/s")
    json.dumps(document(out, out, True), allow_nan=False)


def test_a_drafter_that_is_always_wrong_is_accepted_never_and_costs_no_token():
    wrong = [(token + 1) % 12 for token in range(12)]
    network = chain_network(SUCCESSORS, guess=wrong)
    for drafter in ("sequential", "parallel"):
        out = generate(network, PROMPT, drafter=drafter, num_draft_tokens=1, max_new_tokens=15)[0]
        assert out.token_ids == [*PROMPT[1:], *PROMPT[1:], 6][:15]
        a = out.acceptance
        assert (a.steps, a.alpha, a.tested, a.drafted) == (15, 0, 14, 14)  # the last has no room to draft


def test_depth_two_is_tested_only_where_depth_one_was_accepted():
    """Half-bad: right about even tokens only, and the root is even each time."""
    successors = [1, 2, 3, 4, 5, 6, 7, 0]
    guess = [token if token % 2 == 0 else 3 - token % 4 for token in range(8)]
    network = chain_network(successors, guess=guess)
    out = generate(network, [7, 0], drafter="sequential", num_draft_tokens=3, max_new_tokens=40)[0]
    a = out.acceptance
    assert out.token_ids == [token % 8 for token in range(1, 41)]
    assert a.tau == 2
    assert a.tested_at_depth == [20, 19]  # the last draft has room for one node
    assert a.accepted_at_depth == [20, 0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(step, max_size=8))
def test_counts_are_consistent_whatever_happens(steps):
    a = counted(steps)
    assert a.steps == len(steps)
    assert a.accepted <= a.tested <= a.drafted
    assert a.accepted <= a.emitted <= a.accepted + a.steps
    assert len(a.tested_at_depth) == len(a.accepted_at_depth)
    for deeper, upper in zip(a.tested_at_depth[1:], a.accepted_at_depth, strict=False):
        assert deeper <= upper  # tested at depth k: accepted at depth k-1
    assert all(0 <= share <= 1 for share in a.conditional)
    assert a.alpha is None or 0 <= a.alpha <= 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(step, max_size=4), max_size=4))
def test_rows_counted_apart_and_added_up_are_rows_counted_together(rows):
    assert total([counted(row) for row in rows]) == counted([one for row in rows for one in row])


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 0), ([1] * 13, 0.9), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_the_share_of_repeated_4grams(tokens, share):
    assert repeated_4grams(tokens) == pytest.approx(share)
