import doctest
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp import UserError
from training import losses, module, schedule
from training.losses import (
    HeadLoss,
    Objective,
    Targets,
    agreement,
    cross_entropy,
    feature_distance,
    targets_at_depth,
)


@pytest.mark.parametrize("documented", [losses, schedule, module])
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
    targets = targets_at_depth(torch.zeros_like(documents), documents, depth)
    assert targets.count == sum(max(0, size - 1 - depth) for size in lengths)


def random_case(vocab_size=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 5, 4, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, 4, generator=generator, requires_grad=True)
    labels = torch.randint(vocab_size, (2, 5), generator=generator)
    labels[0, 2] = labels[1, 4] = losses.IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("at_once", [7, 21, 2**26])
def test_cross_entropy_and_its_gradients_do_not_depend_on_the_blocks(monkeypatch, at_once):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", at_once)
    hidden, weight, labels = random_case()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    gradients = torch.autograd.grad(3 * expected, [hidden, weight])
    found = cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, [hidden, weight]), gradients)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(hidden, weight, labels), expected)


@pytest.mark.parametrize("fixed", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(fixed):
    hidden, weight, labels = random_case()
    parts = {"hidden": hidden, "weight": weight}
    parts[fixed] = parts[fixed].detach()
    cross_entropy(*parts.values(), labels).backward()
    assert parts[fixed].grad is None
    assert all(part.grad is not None for name, part in parts.items() if name != fixed)


def test_no_target_at_all_costs_exactly_nothing():
    hidden, weight, labels = random_case()
    loss = cross_entropy(hidden, weight, torch.full_like(labels, losses.IGNORED))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_uniform_logits_cost_ln_v_a_target():
    labels = torch.tensor([[3, 31, losses.IGNORED, 0]])
    loss = cross_entropy(torch.randn(1, 4, 8), torch.zeros(32, 8), labels)
    assert loss.item() / 3 == pytest.approx(math.log(32))


def test_half_precision_states_give_float32_losses():
    hidden, weight, labels = random_case()
    loss = cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_a_head_is_compared_with_the_trunks_law_of_the_same_token(depth):
    hidden, weight, _ = random_case(seed=1)
    trunk = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2))
    valid = torch.rand(2, 5) < 0.8
    valid[:, max(0, 5 - depth) :] = False
    found = agreement(hidden, trunk, weight, Targets(torch.zeros(2, 5, dtype=torch.long), valid), depth)
    same, overlap = 0.0, 0.0
    for row, i in valid.nonzero().tolist():
        q, p = (
            (weight @ hidden[row, i]).detach().softmax(0),
            (weight @ trunk[row, i + depth]).detach().softmax(0),
        )
        same += float(p.argmax() == q.argmax())
        overlap += float(torch.minimum(p, q).sum())
    assert found.tolist() == pytest.approx([same, overlap], rel=1e-5)


def test_a_head_that_says_what_the_trunk_says_has_alpha_one():
    hidden, weight, _ = random_case()
    targets = Targets(torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool))
    assert agreement(hidden, hidden, weight, targets, 0).tolist() == pytest.approx([10, 10])


def test_a_head_is_weighted_in_total_or_each_but_not_both():
    assert HeadLoss(total=0.4).weights(4) == [0.1] * 4
    assert HeadLoss(each=1.0).weights(2) == [1.0, 1.0]
    for options in ({}, {"total": 1.0, "each": 1.0}):
        with pytest.raises(UserError, match="either total or each"):
            HeadLoss(**options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("curriculum", "random"),
        ("dropout_schedule", "linear"),
        ("p_max", 1.5),
        ("e_scale", -1),
        ("rotation", 0),
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


def test_the_distance_of_features_is_smooth_l1_where_there_is_a_target():
    hidden = torch.zeros(1, 3, 2, requires_grad=True)
    feature = torch.tensor([[[0.5, 0.0], [3.0, 1.0], [9.0, 9.0]]])
    distance = feature_distance(hidden, feature, torch.tensor([[True, True, False]]))
    assert distance.item() == pytest.approx((0.125 + 0.0) / 2 + (2.5 + 0.5) / 2)
    distance.backward()
    assert not hidden.grad[0, 2].any()


def test_agreement_reads_a_head_with_its_own_matrix():
    g = torch.Generator().manual_seed(0)
    state, matrix, own = (torch.randn(*shape, generator=g) for shape in ((1, 6, 4), (9, 4), (9, 4)))
    tokens = torch.zeros(1, 6, dtype=torch.long)
    targets = targets_at_depth(tokens, tokens, 0)
    same, overlap = agreement(state, state, matrix, targets, 0)
    assert (same, overlap.item()) == (5, pytest.approx(5))
    p, q = ((state @ m.T).softmax(-1)[:, :-1] for m in (matrix, own))
    found = agreement(state, state, matrix, targets, 0, own=own)
    assert found[1].item() == pytest.approx(torch.minimum(p, q).sum().item(), rel=1e-5)
