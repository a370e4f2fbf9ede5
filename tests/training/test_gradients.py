"""What is told about gradients against gradients taken one by one."""

import pytest
import torch
from tiny import tiny_network

from training.gradients import TapGradients, at_lower_taps, in_weights, norms, product
from training.losses import HeadLoss, Objective
from training.plan import Plan

OBJECTIVE = Objective(e_scale=0.2, curriculum="none", rotation=1, p_max=0.0, dropout_schedule="constant")


def numbers(sums: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in sums.items()}


def case() -> tuple[Plan, dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    rows = {"tokens": tokens, "documents": torch.zeros_like(tokens)}
    losses = {"sequential": HeadLoss(total=0.3), "parallel": HeadLoss(each=1.0)}
    plan = Plan(tiny_network(), losses, OBJECTIVE, max_steps=1)
    return plan, rows, dict(enumerate(1 / plan.counts(rows)))


def test_a_familys_gradient_at_the_taps_is_compared_with_the_next_tokens_there():
    plan, rows, scales = case()
    seen, at_taps, first = {}, TapGradients(), {}

    def watch(name, found, states):
        seen[name] = found
        at_taps.note(name, found)
        if name == "trunk":
            first.update(at_lower_taps(states, 4, found, plan.taps))
        else:
            at_taps.compare(name, found, first)

    at_taps.begin_step()
    plan.backward(rows, 0, scales, watch=watch)
    told = at_taps.lap(numbers)
    states = plan.states(rows)  # the next token's gradient at the tap of the parallel heads, by hand
    logits = plan.trunk.lm_head(states[4])[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, rows["tokens"][:, 1:].flatten())
    (at_three,) = torch.autograd.grad(loss, states[3])
    torch.testing.assert_close(first[3], at_three)
    mine = seen["parallel"][3].flatten()
    wanted = torch.nn.functional.cosine_similarity(mine, at_three.flatten(), dim=0).item()
    assert told["train/parallel/tap_gradient_cosine"] == pytest.approx(wanted, rel=1e-4)
    assert told["train/parallel/tap_gradient_median"] == pytest.approx(mine.norm().item(), rel=1e-4)


def test_the_gradient_in_the_weights_is_each_familys_own():
    plan, rows, scales = case()
    parameters = list(plan.network.parameters())

    def run(name):
        plan.backward(rows, 0, scales, only=name)

    found = in_weights(run, ["trunk", "sequential", "parallel"], plan.trunk, parameters)
    assert all(parameter.grad is None for parameter in parameters)
    flat = {}
    for name in ("trunk", "parallel"):
        run(name)
        flat[name] = torch.cat([
            torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in plan.trunk.parameters()
        ])  # fmt: skip
        for parameter in parameters:
            parameter.grad = None
    assert found["train/parallel/weight_gradient_norm"] == pytest.approx(
        flat["parallel"].norm().item(), rel=1e-4
    )
    cosine = torch.nn.functional.cosine_similarity(flat["trunk"], flat["parallel"], dim=0).item()
    assert found["train/parallel/weight_gradient_cosine"] == pytest.approx(cosine, rel=1e-3)


def test_the_parts_add_up_to_the_whole_gradient():
    plan, rows, scales = case()
    plan.backward(rows, 0, scales)
    whole = {name: p.grad.clone() for name, p in plan.network.named_parameters() if p.grad is not None}
    plan.network.zero_grad()
    for name in ("trunk", "sequential", "parallel"):
        plan.backward(rows, 0, scales, only=name)
    for name, value in whole.items():
        torch.testing.assert_close(plan.network.get_parameter(name).grad, value, rtol=1e-4, atol=1e-6)


def test_micro_batches_add_up_to_the_norm_of_their_step():
    rows = {3: torch.randn(4, 5, 6)}
    whole, parts = TapGradients(), TapGradients()
    for one in (whole, parts):
        one.begin_step()
    whole.note("eagle", rows)
    for row in range(4):
        parts.note("eagle", {3: rows[3][row : row + 1]})
    assert parts.lap(numbers) == pytest.approx(whole.lap(numbers))


def test_a_step_at_which_a_family_was_silent_counts_as_zero():
    at_taps, one = TapGradients(), {1: torch.ones(1, 1, 4)}
    for told in (one, {}, one, {}):
        at_taps.begin_step()
        at_taps.note("early_exit", told)
    assert at_taps.squares(numbers) == {"early_exit": [4, 0, 4, 0]}
    again = TapGradients()
    again.go_on(at_taps.squares(numbers), 2)
    assert again.squares(numbers) == {"early_exit": [2, 0, 2, 0]}  # an equal share for each of two processes


def test_spikes_are_norms_of_more_than_three_times_the_median():
    told = norms("x", [1.0] * 98 + [2.9, 3.1])
    assert told["train/x/tap_gradient_spikes"] == 1
    assert told["train/x/tap_gradient_median"] == 1
    assert 2.8 < told["train/x/tap_gradient_p99"] < 3.1
    assert product({0: torch.ones(2)}, {0: torch.full((2,), 3.0)}) == 6
