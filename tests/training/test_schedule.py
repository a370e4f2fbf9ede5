import math

import pytest
import torch

from training.schedule import (
    dropout_rates,
    exit_scales,
    exit_weights,
    exits_enabled,
    kept_layers,
    learning_rate_factor,
)


def test_layer_dropout_follows_the_paper_by_hand():
    rates = dropout_rates(5, 0.2, schedule="constant", step=7, max_steps=100)
    assert rates == pytest.approx([0.2 * (math.exp(layer * math.log(2) / 4) - 1) for layer in range(5)])
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)


def test_exponential_layer_dropout_grows_from_nothing_to_p_max():
    def last(step):
        return dropout_rates(3, 0.1, schedule="exponential", step=step, max_steps=101)[-1]

    assert [last(0), last(50), last(100)] == pytest.approx([0, 0.1 * (2**0.5 - 1), 0.1])
    assert last(1000) == pytest.approx(0.1)


def test_the_rows_that_a_layer_drops_depend_on_seed_and_step_alone():
    rates = [0.0, 0.3, 0.9]
    torch.manual_seed(1)
    first = kept_layers(rates, 1000, seed=3, step=5)
    torch.manual_seed(2)
    assert torch.equal(first, kept_layers(rates, 1000, seed=3, step=5))
    assert not torch.equal(first, kept_layers(rates, 1000, seed=3, step=6))
    assert not torch.equal(first, kept_layers(rates, 1000, seed=4, step=5))
    assert first[0].all()
    assert first.float().mean(1).tolist() == pytest.approx([1.0, 0.7, 0.1], abs=0.06)  # 4 standard deviations


def test_without_dropout_no_row_is_drawn():
    assert kept_layers([0.0, 0.0], 4, seed=0, step=0) is None


def test_a_rate_of_one_drops_every_row():
    assert not kept_layers([0.0, 1.0], 100, seed=0, step=0)[1].any()


def test_exit_scales_follow_the_paper_by_hand():
    # L = 5, e_scale 0.2: 0.2 * (0, 1, 3, 6) and 4 + 0.2 * 6
    assert exit_scales(5, 0.2) == pytest.approx([0.0, 0.2, 0.6, 1.2, 5.2])


def test_exit_weights_add_up_to_one_over_the_enabled_layers():
    weights = exit_weights(exit_scales(5, 0.2), [True, False, True, False, True])
    assert weights == pytest.approx([0, 0, 0.6 / 5.8, 0, 5.2 / 5.8])


def test_exit_weights_of_one_layer_are_the_plain_loss():
    assert exit_weights(exit_scales(1, 0.2), [True]) == [1.0]


def test_the_rotation_enables_every_layer_equally_often_and_the_last_always():
    steps = [exits_enabled(8, "rotational", step=step, max_steps=40, rotation=4) for step in range(40)]
    assert [sum(on) for on in zip(*steps, strict=True)] == [10] * 7 + [40]


def test_the_gradual_curriculum_opens_one_more_layer_every_share_of_the_first_half():
    counts = [
        sum(exits_enabled(4, "gradual", step=step, max_steps=80, rotation=1))
        for step in (0, 9, 10, 20, 30, 79)
    ]
    assert counts == [1, 1, 2, 3, 4, 4]


def test_the_learning_rate_is_a_function_of_the_step():
    rates = [learning_rate_factor(step, warmup_steps=10, max_steps=110, floor=0.1) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)


def test_processes_drop_what_one_with_all_rows_drops():
    rates = [0.0, 0.3, 0.9]
    whole = kept_layers(rates, 12, seed=3, step=5)
    parts = [kept_layers(rates, 4, seed=3, step=5, place=(process, 3)) for process in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(parts[0], parts[1])


def test_every_row_is_dropped_on_its_own():
    keep = kept_layers([0.5, 0.5], 4000, seed=0, step=0).float()
    both = (keep[0] * keep[1]).mean().item()
    assert both == pytest.approx(0.25, abs=0.03)  # 4 standard deviations
    assert (keep[0, 1:] * keep[0, :-1]).mean().item() == pytest.approx(0.25, abs=0.03)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate_factor(0, warmup_steps=0, max_steps=10, floor=0.0) == 1
