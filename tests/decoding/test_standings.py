"""Speed by category and contender, with intervals over prompts."""

import pytest

from decoding.contest import Run
from decoding.standings import OVERALL, ratio, result, standings


def row(category, plain, drafted, tokens=10, identical=True):
    counts = {
        "emitted": 10, "steps": 5, "drafted": 8, "tested_at_depth": [5, 3], "accepted_at_depth": [3, 2],
    }  # fmt: skip
    one = lambda seconds: {"tokens": tokens, "seconds": seconds, "identical": identical}  # noqa: E731
    return {
        "category": category,
        "contenders": {"plain": one(plain), "ngram": one(drafted) | counts, "transformers": one(plain)},
    }


NAMES = ["plain", "ngram", "transformers"]


def test_speed_is_all_tokens_by_all_seconds_and_a_prompts_seconds_are_the_median():
    rows = [row("a", [2.0, 9.0, 1.0], [1.0]), row("a", [4.0], [1.0], tokens=20)]
    found = standings(rows, NAMES)["a"]
    assert found["plain"]["tokens_per_second"] == 30 / 6
    assert found["ngram"]["tokens_per_second"] == 30 / 2
    assert found["ngram"]["to_plain"]["value"] == pytest.approx(3.0)


def test_the_whole_leaves_out_what_is_chosen_to_be_unpredictable():
    rows = [row("a", [1.0], [0.5]), row("unpredictable", [1.0], [2.0])]
    found = standings(rows, NAMES)
    assert list(found) == [OVERALL, "a", "unpredictable"]
    assert found[OVERALL]["ngram"]["to_plain"]["value"] == 2.0
    assert found["unpredictable"]["ngram"]["to_plain"]["value"] == 0.5


def test_prompts_that_agree_leave_no_interval_and_others_do():
    alike = ratio([row("a", [1.0], [0.5])] * 5, "ngram", "plain")
    assert alike == {"value": 2.0, "low": 2.0, "high": 2.0}
    rows = [row("a", [1.0], [seconds]) for seconds in (0.25, 0.5, 1.0, 2.0)]
    found = ratio(rows, "ngram", "plain")
    assert 0.5 <= found["low"] < found["value"] < found["high"] <= 4.0


def test_an_interval_holds_what_is_true_of_all_prompts_about_as_often_as_it_says():
    import random

    draw, hits = random.Random(0), 0
    for _ in range(60):
        rows = [row("a", [1.0], [draw.choice([0.5, 1.0])]) for _ in range(40)]
        found = ratio(rows, "ngram", "plain")
        hits += found["low"] <= 4 / 3 <= found["high"]
    assert hits >= 50  # of 60; 57 are expected


def test_acceptance_is_of_all_prompts_together_and_unknown_of_other_packages():
    found = standings([row("a", [1.0], [1.0])] * 2, NAMES)[OVERALL]
    assert (found["ngram"]["tau"], found["ngram"]["alpha"]) == (2.0, 5 / 8)
    assert found["ngram"]["conditional"] == [3 / 5, 2 / 3]
    assert (found["plain"]["tau"], found["plain"]["alpha"]) == (None, None)


def test_without_transformers_there_is_no_ratio_to_it():
    assert standings([row("a", [1.0], [1.0])], NAMES[:2])[OVERALL]["ngram"]["to_transformers"] is None


def test_one_run_with_other_tokens_is_enough_to_differ():
    plain = [Run([1, 2], 1.0)]
    assert result([Run([1, 2], 1.0), Run([1, 2], 2.0)], plain)["identical"]
    assert not result([Run([1, 2], 1.0), Run([1, 3], 2.0)], plain)["identical"]
