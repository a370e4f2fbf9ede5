"""Losses read block by block against the plain formulas over whole logits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from training import readings
from training.readings import KINDS, Reading, feature_distance, gradient, law_at_depth, measured, read
from training.targets import IGNORED, Targets, targets_at_depth


def case(vocab_size=7, seed=0, ids=None, dtype=torch.float64) -> Reading:
    g = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    labels = torch.randint(vocab_size, (2, 5), generator=g)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[0, 2] = valid[1, 4] = False
    return Reading(
        new(2, 5, 4), new(vocab_size, 4).requires_grad_(), Targets(labels, valid),
        new(2, 5, 4), new(vocab_size, 4), None if ids is None else torch.tensor(ids),
    )  # fmt: skip


def plain(reading: Reading, kind: str, hidden: torch.Tensor) -> torch.Tensor:
    """[Q, N] from whole logits, by the formulas."""
    logits = hidden.flatten(0, 1) @ reading.matrix.T
    log_p = (reading.law.flatten(0, 1) @ reading.law_matrix.T).log_softmax(-1)
    ids = torch.arange(logits.shape[1]) if reading.ids is None else reading.ids
    q = logits[:, ids].softmax(-1)
    p = log_p.exp()[:, ids]
    overlap = torch.minimum(p, q).sum(-1)
    label = reading.targets.labels.flatten()
    hit = ids == label[:, None]
    known = hit.any(-1)
    weight = (-3 * overlap.detach()).exp()
    kl = (p * (p.log() - q.log())).sum(-1)
    of_label = torch.where(known, (q * hit).sum(-1), 1.0)
    chance = (of_label / torch.where(known, (p * hit).sum(-1), 1.0)).clamp(max=1) * known
    return {
        "ce": lambda: -of_label.log()[None],
        "kl": lambda: kl[None],
        "reverse_kl": lambda: (q * (q.log() - p.log())).sum(-1)[None],
        "tv": lambda: 1 - overlap[None],
        "lk": lambda: -overlap.log()[None],
        "hybrid": lambda: (weight * kl + (1 - weight) * (1 - overlap))[None],
        "tv_chain": lambda: overlap[None],
        "accept": lambda: torch.stack([overlap, chance]),
    }[kind]()


@pytest.mark.parametrize("ids", [None, [0, 2, 3, 6]])
@pytest.mark.parametrize("at_once", [7, 21, 2**26])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_its_gradients_are_the_formulas_whatever_the_blocks(monkeypatch, kind, at_once, ids):
    monkeypatch.setattr(readings, "LOGITS_AT_ONCE", at_once)
    reading = case(ids=ids)
    hidden = reading.hidden.clone().requires_grad_()
    expected = plain(reading, kind, hidden)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((factors * expected).sum(), [hidden, reading.matrix])
    torch.testing.assert_close(read(reading, kind), expected.detach())
    found = gradient(reading, kind, factors, 3.0)
    torch.testing.assert_close([found, reading.matrix.grad], list(wanted))


@pytest.mark.parametrize("at_once", [7, 2**26])
@pytest.mark.parametrize("kind", KINDS)
def test_a_normaliser_known_before_changes_nothing(monkeypatch, kind, at_once):
    monkeypatch.setattr(readings, "LOGITS_AT_ONCE", at_once)
    reading = case(ids=[0, 2, 3, 6])
    known = replace(reading, normaliser=readings.normalisers(reading.law, reading.law_matrix))
    torch.testing.assert_close(read(known, kind), read(reading, kind))
    torch.testing.assert_close(measured(known), measured(reading))


def test_a_fixed_matrix_gets_no_gradient():
    reading = case()
    reading.matrix.requires_grad_(False)
    assert gradient(reading, "ce", torch.ones(1, 10)).any()
    assert reading.matrix.grad is None


def test_uniform_logits_cost_ln_v_a_target():
    reading = case(vocab_size=32)
    with torch.no_grad():
        reading.matrix.zero_()
    loss, targets, *_ = measured(reading).tolist()
    assert targets == 8
    assert loss / targets == pytest.approx(math.log(32))


def test_half_precision_states_give_float32_losses():
    reading = case(dtype=torch.bfloat16)
    assert read(reading, "ce").dtype == torch.float32
    assert gradient(reading, "tv", torch.ones(1, 10), 3.0).isfinite().all()


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_a_head_is_compared_with_the_trunks_law_of_the_same_token(depth):
    trunk = torch.arange(10.0).view(1, 5, 2)
    moved = law_at_depth(trunk, depth)
    for i in range(5):
        assert moved[0, i].tolist() == (trunk[0, i + depth].tolist() if i + depth < 5 else [0, 0])


@pytest.mark.parametrize("ids", [None, [1, 4, 5]])
def test_what_is_measured_is_summed_over_the_targets(ids):
    reading = case(ids=ids)
    overlap = plain(reading, "tv_chain", reading.hidden)[0]
    valid = reading.targets.valid.flatten()
    entropy = plain(reading, "ce", reading.hidden)[0]
    logits = reading.hidden.flatten(0, 1) @ reading.matrix.T
    if ids is not None:
        outside = torch.ones(7, dtype=torch.bool)
        outside[ids] = False
        logits = logits.masked_fill(outside, -torch.inf)
    same = logits.argmax(-1) == (reading.law.flatten(0, 1) @ reading.law_matrix.T).argmax(-1)
    expected = [float((x * valid).sum()) for x in (entropy, torch.ones(10), same, overlap)]
    assert measured(reading).tolist() == pytest.approx(expected)


def test_a_head_that_says_what_the_trunk_says_has_alpha_one():
    reading = case()
    same = Reading(reading.law, reading.law_matrix, reading.targets, reading.law, reading.law_matrix)
    assert measured(same).tolist()[1:] == pytest.approx([8, 8, 8])


def test_labels_outside_of_the_draft_vocabulary_are_ignored():
    tokens = torch.tensor([[3, 1, 5, 2]])
    targets = targets_at_depth(tokens, torch.zeros_like(tokens), 0)
    reading = Reading(
        torch.zeros(1, 4, 2), torch.zeros(6, 2), targets, torch.zeros(1, 4, 2), torch.zeros(6, 2)
    )
    assert reading.labels.tolist() == [[1, 5, 2, IGNORED]]
    some = Reading(*(getattr(reading, key) for key in ("hidden", "matrix", "targets", "law", "law_matrix")),
                   ids=torch.tensor([1, 2]))  # fmt: skip
    assert some.labels.tolist() == [[0, IGNORED, 1, IGNORED]]


def test_the_distance_of_features_is_smooth_l1_where_there_is_a_target():
    hidden = torch.zeros(1, 3, 2, requires_grad=True)
    feature = torch.tensor([[[0.5, 0.0], [3.0, 1.0], [9.0, 9.0]]])
    distance = feature_distance(hidden, feature, torch.tensor([[True, True, False]]))
    assert distance.item() == pytest.approx((0.125 + 0.0) / 2 + (2.5 + 0.5) / 2)
    distance.backward()
    assert not hidden.grad[0, 2].any()


def test_the_cross_entropy_is_torchs():
    reading = case()
    logits = (reading.hidden @ reading.matrix.T).flatten(0, 1)
    labels = reading.targets.labels.flatten()
    assert measured(reading)[0].item() == pytest.approx(
        F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
    )
