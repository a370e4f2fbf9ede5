"""What holds for every head and every loss: padding, ignored tokens, missing targets, uniform laws."""

import math

import pytest
import torch
from tiny import tiny_network, tiny_trunk

from mtp import Network
from mtp.checkpoint import build_head
from training.backward import coefficients
from training.losses import HeadLoss, Objective
from training.plan import Plan
from training.readings import KINDS

OBJECTIVE = Objective(e_scale=0.2, curriculum="none", rotation=1, p_max=0.0, dropout_schedule="constant")
HEADS = {
    "sequential": {}, "parallel": {}, "medusa": {}, "eagle": {"rollout": 4}, "early_exit": {},
    "repeated": {"depth": 1, "repeat": 4}, "causal": {"form": "causal"}, "linear": {"form": "linear"},
    "adapter": {"adapter": 4},
}  # fmt: skip
KIND_OF = {"repeated": "sequential", "causal": "parallel", "linear": "parallel", "adapter": "early_exit"}


def plan_of(name: str, kind: str = "ce") -> Plan:
    trunk = tiny_trunk()
    network = Network(trunk, {name: build_head(KIND_OF.get(name, name), trunk, **HEADS[name])})
    loss = None if name == "early_exit" else HeadLoss(each=1.0, kind=kind, feature=float(name == "eagle"))
    return Plan(network, {name: loss}, OBJECTIVE, max_steps=10)


def batch(rows: int = 2, length: int = 10) -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "documents": torch.zeros_like(tokens)}


def gradients(plan: Plan, rows) -> dict[str, torch.Tensor]:
    plan.network.zero_grad()
    plan.backward(rows, 0, dict(enumerate(1 / plan.counts(rows).clamp(min=1))))
    return {name: p.grad.clone() for name, p in plan.network.named_parameters() if p.grad is not None}


def kinds_of(name: str) -> tuple[str, ...]:
    return ("ce",) if name == "early_exit" else ("ce", "tv", "accept", "tv_chain")


CASES = [(name, kind) for name in HEADS for kind in kinds_of(name)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_padding_moves_no_loss_and_no_gradient(name, kind):
    plan, rows = plan_of(name, kind), batch()
    plan.network.double()  # a random block fed its own output again and again magnifies rounding
    padded = {
        "tokens": torch.cat([rows["tokens"], torch.randint(64, (2, 40))], 1),
        "documents": torch.cat([rows["documents"], torch.full((2, 40), -1)], 1),
    }
    plain, found = plan.measure(rows, 0), plan.measure(padded, 0)
    for key, sums in plain.items():
        assert found[key].tolist() == pytest.approx(sums.tolist(), rel=1e-4), key
    wanted, moved = gradients(plan, rows), gradients(plan, padded)
    for key, value in wanted.items():
        torch.testing.assert_close(moved[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_isolated_documents_train_as_if_each_had_a_row_of_its_own(name):
    """Up to the rounding of rotary angles, which are float32 and begin anew in a row."""
    plan, rows, isolated = plan_of(name), batch(), {"isolated": torch.ones(2, dtype=torch.bool)}
    plan.network.double()
    rows["documents"] = (torch.arange(10) >= 6).long().repeat(2, 1)
    rows["documents"][1, 9:] = -1
    alone = {"tokens": torch.zeros(4, 10, dtype=torch.long), "documents": torch.full((4, 10), -1)}
    for row, (source, first, stop) in enumerate([(0, 0, 6), (0, 6, 10), (1, 0, 6), (1, 6, 9)]):
        for key, value in alone.items():
            value[row, : stop - first] = rows[key][source, first:stop]
    wanted, found, mixed = (plan.measure(each, 0) for each in (alone, rows | isolated, rows))
    for key, sums in wanted.items():
        assert found[key].tolist() == pytest.approx(sums.tolist(), rel=1e-5), key
    assert any(mixed[key].tolist() != pytest.approx(wanted[key].tolist(), rel=1e-2) for key in wanted)
    moved = gradients(plan, rows | isolated)
    for key, value in gradients(plan, alone).items():
        torch.testing.assert_close(moved[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_an_ignored_token_at_the_end_moves_no_loss(name):
    """As an input it would be seen by what comes behind it; as a target alone it must not matter."""
    plan, rows = plan_of(name), batch()
    rows["mask"] = torch.ones_like(rows["tokens"], dtype=torch.bool)
    rows["mask"][:, -1] = False
    other = rows | {"tokens": rows["tokens"].clone()}
    other["tokens"][:, -1] = (other["tokens"][:, -1] + 1) % 64
    before, after = plan.measure(rows, 0), plan.measure(other, 0)
    for key, sums in before.items():
        assert after[key].tolist() == pytest.approx(sums.tolist(), rel=1e-5), key


@pytest.mark.parametrize("name", HEADS)
def test_the_targets_of_every_depth_are_counted_as_a_loop_would(name):
    plan, rows = plan_of(name), batch(rows=3, length=12)
    rows["documents"] = (torch.arange(12) >= 4).long().repeat(3, 1)
    rows["documents"][1, 9:] = -1
    rows["mask"] = torch.rand(3, 12, generator=torch.Generator().manual_seed(1)) < 0.7
    states = plan.states(rows)
    for family in plan.families(rows, 0):
        for readout in family.readouts(states):
            ahead, documents = readout.depth + 1, rows["documents"].tolist()
            count = sum(
                documents[r][i] >= 0
                and documents[r][i] == documents[r][i + ahead]
                and bool(rows["mask"][r, i + ahead])
                for r in range(3)
                for i in range(12 - ahead)
            )
            assert plan.measure(rows, 0)[family.full_name(readout)][1] == count


@pytest.mark.parametrize("name", HEADS)
def test_uniform_laws_cost_ln_v_at_every_depth(name):
    plan, rows = plan_of(name), batch()
    torch.nn.init.zeros_(plan.trunk.model.lm_head.weight)
    for head in plan.head(name).heads if name == "medusa" else ():
        torch.nn.init.zeros_(head.lm_head.weight)
    rows["documents"][:, 8:] = -1
    for key, (loss, targets, _, alpha) in plan.measure(rows, 0).items():
        assert loss / targets == pytest.approx(math.log(64), rel=1e-5), key
        assert alpha == pytest.approx(targets)


@pytest.mark.parametrize(("name", "kind"), [*CASES, *(("sequential", kind) for kind in KINDS)])
def test_a_depth_without_targets_costs_nothing_and_its_gradient_is_finite(name, kind):
    plan, rows = plan_of(name, kind), batch(length=3)  # depths 2, 3, 4 have no target
    sums = plan.measure(rows, 0)
    for key, value in sums.items():
        if key[-1] in "234" and "depth" in key:
            assert value.tolist() == [0, 0, 0, 0]
    found = gradients(plan, rows)
    assert all(value.isfinite().all() for value in found.values())
    rows["documents"][:] = -1  # nothing at all
    assert not any(value.any() for value in gradients(plan, rows).values())


def test_only_the_places_before_a_trained_token_get_a_gradient():
    """One row of six tokens, of which 4 to 6 are trained: at depth k the loss lies k+1 places before them."""
    network = tiny_network()
    losses = {"parallel": HeadLoss(each=1.0), "medusa": HeadLoss(each=1.0)}
    plan, rows = Plan(network, losses, OBJECTIVE, max_steps=1), batch(rows=1, length=6)
    rows["mask"] = torch.tensor([[False, False, False, True, True, True]])
    states = plan.states(rows)
    text = plan.text(rows, states, dict.fromkeys(plan.depths, torch.tensor(1.0)))
    for family in plan.families(rows, 0):
        readings = [text.reading(readout) for readout in family.readouts(states)]
        shares = [torch.tensor(1.0)] * len(readings)
        for reading, factors in zip(readings, coefficients(family, readings, shares), strict=True):
            depth = next(k for k, one in text.targets.items() if one is reading.targets)
            assert factors.nonzero()[:, 1].tolist() == [i for i in range(5 - depth) if i + 1 + depth >= 3]
