import dataclasses
import doctest
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp import UserError
from training import distances, gradients, losses, metrics, schedule, targets
from training.losses import HeadLoss, Objective
from training.targets import targets_at_depth

ROOT = Path(__file__).parents[2]
DOCUMENTED = [losses, schedule, targets, metrics, distances, gradients]


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda module: module.__name__)
def test_the_worked_examples_are_right(documented):
    assert doctest.testmod(documented, extraglobs={"torch": torch}).failed == 0


@st.composite
def packed_rows(draw):
    """Rows of whole documents with padding at the end, and which tokens may be targets."""
    length = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 6), max_size=5))
        row = [number for number, size in enumerate(lengths) for _ in range(size)][:length]
        rows.append(row + [-1] * (length - len(row)))
    documents = torch.tensor(rows)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=documents.numel(), max_size=documents.numel())))
    return documents, mask.view(documents.shape) if draw(st.booleans()) else None


@given(packed_rows(), st.integers(0, 6))
@settings(deadline=None)
def test_the_target_at_each_depth_is_the_token_that_far_ahead_in_the_same_document(rows, depth):
    documents, mask = rows
    count, length = documents.shape
    tokens = torch.arange(count * length).view(count, length)
    found = targets_at_depth(tokens, documents, depth, mask)
    for row in range(count):
        for i in range(length):
            there = i + 1 + depth
            exists = there < length and documents[row, i] >= 0 and documents[row, i] == documents[row, there]
            exists = bool(exists and (mask is None or mask[row, there]))
            assert found.valid[row, i] == exists
            if exists:
                assert found.tokens[row, i] == tokens[row, there]


@pytest.mark.parametrize("depth", range(5))
def test_a_packed_row_supervises_exactly_the_targets_inside_its_documents(depth):
    lengths = [1, 2, 7, 4]
    documents = torch.tensor([[d for d, size in enumerate(lengths) for _ in range(size)] + [-1, -1]])
    found = targets_at_depth(torch.zeros_like(documents), documents, depth)
    assert found.count == sum(max(0, size - 1 - depth) for size in lengths)


def test_a_head_is_weighted_in_total_or_each_but_not_both():
    assert HeadLoss(total=0.4).weights(4) == [0.1] * 4
    assert HeadLoss(each=1.0).weights(2) == [1.0, 1.0]
    for options in ({}, {"total": 1.0, "each": 1.0}):
        with pytest.raises(UserError, match="either total or each"):
            HeadLoss(**options)


def test_medusas_weights_are_powers_of_its_decay():
    assert HeadLoss(each=0.8, decay=0.8).weights(3) == pytest.approx([0.8, 0.8**2, 0.8**3])


def test_fastmtps_weights_are_powers_that_add_up_to_the_total():
    assert HeadLoss(total=1.0, decay=0.6).weights(3) == pytest.approx([0.51, 0.306, 0.184], abs=1e-3)


def test_lambda_falls_for_the_last_share_of_the_steps():
    loss = HeadLoss(total=0.3, late=0.1, late_share=4.8 / 14.8)  # DeepSeek-V3: 10 T tokens, then 4.8 T
    assert [loss.weights(1, done=step / 14.8)[0] for step in (0, 9.9, 10.1, 14.7)] == [0.3, 0.3, 0.1, 0.1]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"each": -1.0}, "loss.each=-1.0 is not a number from 0 on"),
        ({"each": 1.0, "kind": "mse"}, "loss.kind=mse is not one of ce, kl"),
        ({"each": 1.0, "late_share": 2}, "loss.late_share=2 is not a number between 0 and 1"),
        ({"total": "x"}, "loss.total=x is not a number"),
        ({"total": 1.0, "decay": float("nan")}, "loss.decay=nan"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused_by_its_key(options, line):
    with pytest.raises(UserError, match=line):
        HeadLoss(**options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("curriculum", "random"),
        ("dropout_schedule", "linear"),
        ("p_max", 1.5),
        ("p_max", "many"),
        ("e_scale", -1),
        ("rotation", 0),
        ("gradient_every", 0),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused_by_its_key(key, value):
    options = {
        "e_scale": 0.2,
        "curriculum": "none",
        "rotation": 1,
        "p_max": 0.0,
        "dropout_schedule": "constant",
    }
    with pytest.raises(UserError, match=f"objective.{key}={value}"):
        Objective(**options | {key: value})


@pytest.mark.parametrize("name", ["sequential", "parallel", "medusa", "eagle"])
def test_a_head_yaml_names_every_option_of_its_loss_with_the_default(name):
    loss = yaml.safe_load((ROOT / "conf" / "head" / f"{name}.yaml").read_text())["loss"]
    defaults = {field.name: field.default for field in dataclasses.fields(HeadLoss)}
    recipe = {"total", "each"} | {"medusa": {"decay"}, "eagle": {"kind", "feature"}}.get(name, set())
    assert set(loss) == set(defaults) - {"eta"} - ({"feature"} - recipe)
    assert {key: value for key, value in loss.items() if key not in recipe} == {
        key: defaults[key] for key in set(loss) - recipe
    }
