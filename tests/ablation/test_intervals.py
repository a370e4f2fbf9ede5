"""Bootstrap intervals."""

import numpy as np
import pytest

from ablation.intervals import PERCENT, RESAMPLES, of_difference, of_ratio, of_speedup, ratio


def sums(*prompts):
    return np.array([[list(prompt) for prompt in prompts]], dtype=float)


def test_a_ratio_is_of_all_prompts_together():
    assert ratio(sums((6, 2), (2, 2))) == 2.0


def test_prompts_that_are_all_alike_leave_no_doubt():
    assert of_ratio(sums((4, 2), (4, 2), (4, 2))) == [2.0, 2.0]


def test_a_single_prompt_says_nothing_of_others():
    assert of_ratio(sums((4, 2))) is None


def test_the_limits_are_those_of_all_possible_draws():
    """Two prompts of ratio 1 and 3: one draw in four has either twice, which is more than one in forty."""
    assert of_ratio(sums((1, 1), (3, 1))) == [1.0, 3.0]


def test_a_speedup_is_paired_so_that_hard_prompts_cancel_out():
    drafted, plain = sums((10, 1), (10, 5)), sums((10, 2), (10, 10))
    assert of_speedup(drafted, plain) == pytest.approx([2.0, 2.0])


def test_a_difference_is_paired_over_seeds_too():
    first = np.array([[[4.0, 2.0], [6.0, 2.0]], [[8.0, 2.0], [10.0, 2.0]]])
    assert of_difference(first, first - [1.0, 0.0]) == pytest.approx([0.5, 0.5])


def test_seeds_widen_an_interval():
    one = np.array([[[2.0, 1.0], [2.0, 1.0]]])
    assert of_ratio(one) == [2.0, 2.0]
    assert of_ratio(np.concatenate([one, one * [2.0, 1.0]])) == [2.0, 4.0]


def test_the_same_numbers_give_the_same_interval():
    some = sums((3, 1), (5, 4), (9, 2))
    assert of_ratio(some) == of_ratio(some)


def test_all_draws_at_once_are_the_draws_one_by_one():
    first, second = np.random.default_rng(1).uniform(1, 9, size=(2, 3, 5, 2))
    rng, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        seeds, prompts = rng.integers(3, size=3), rng.integers(5, size=5)
        found.append(ratio(first[seeds][:, prompts]) - ratio(second[seeds][:, prompts]))
    assert of_difference(first, second) == pytest.approx(list(np.percentile(found, PERCENT)))


def test_a_ratio_that_divides_by_nothing_is_no_number():
    assert of_ratio(sums((0, 0), (0, 0))) is None
