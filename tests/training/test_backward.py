"""The backward pass in parts gives the gradients of the plain one, in less memory and hardly more time."""

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_network, tiny_trunk
from transformers import LlamaConfig, LlamaForCausalLM

from mtp import Network, Trunk
from mtp.checkpoint import build_head
from training import readings
from training.distances import (
    forward_kl,
    hybrid,
    log_alpha,
    ratio,
    rejected_by,
    rejected_on_text,
    reverse_kl,
    total_variation,
)
from training.losses import HeadLoss, Objective
from training.plan import Plan
from training.readings import KINDS
from training.targets import targets_by_depth
from training.trainer import spare_memory

OBJECTIVE = Objective(e_scale=0.2, curriculum="none", rotation=1, p_max=0.0, dropout_schedule="constant")
LOSSES = {
    "sequential": HeadLoss(total=0.3, decay=0.7),
    "parallel": HeadLoss(each=1.0),
    "medusa": HeadLoss(each=0.5),
    "eagle": HeadLoss(each=0.1, feature=1.0, kind="kl"),
    "early_exit": None,
}


def packed(rows: int = 3, length: int = 12, vocab_size: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of two documents, padding, and a mask."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (rows, length), generator=g)
    documents = (torch.arange(length) >= length // 3).long().repeat(rows, 1)
    documents[0, -2:] = -1
    return {"tokens": tokens, "documents": documents, "mask": torch.rand(rows, length, generator=g) < 0.8}


def plan_of(network: Network, losses=LOSSES, objective=OBJECTIVE, frozen: bool = False) -> Plan:
    network.requires_grad_(True)
    network.trunk.requires_grad_(not frozen)
    return Plan(network, losses, objective, max_steps=10, frozen=frozen)


def scales_of(plan: Plan, rows) -> dict[int, torch.Tensor]:
    return dict(enumerate(1 / plan.counts(rows).clamp(min=1)))


def gradients(plan: Plan, rows) -> dict[str, torch.Tensor]:
    plan.network.zero_grad()
    plan.backward(rows, 0, scales_of(plan, rows))
    return {name: p.grad.clone() for name, p in plan.network.named_parameters() if p.grad is not None}


def plain_gradients(plan: Plan, rows) -> dict[str, torch.Tensor]:
    """Every loss from whole logits in one graph, and one backward pass."""
    plan.network.zero_grad()
    states = plan.states(rows)
    total = sum(plain_loss(plan, family, states, rows) for family in plan.families(rows, 0))
    total.backward()
    return {name: p.grad.clone() for name, p in plan.network.named_parameters() if p.grad is not None}


def plain_loss(plan: Plan, family, states, rows) -> torch.Tensor:
    scales, targets = scales_of(plan, rows), targets_by_depth(rows, plan.depths)
    law = plan.trunk.lm_head(states[plan.trunk.num_layers]).log_softmax(-1).detach()
    losses, alphas, chances, counted = [], [], [], []
    for readout, weight in zip(family.readouts(states), family.weights, strict=True):
        k, target = readout.depth, targets[readout.depth]
        matrix = plan.trunk.model.lm_head.weight if readout.matrix is None else readout.matrix
        log_q = F.linear(readout.hidden, matrix).log_softmax(-1)
        log_p = torch.cat([law[:, k:], torch.zeros_like(law[:, :k])], dim=1)
        at = target.tokens[..., None]
        kinds = {
            "ce": lambda q=log_q, at=at: -q.gather(-1, at)[..., 0],
            "kl": lambda p=log_p, q=log_q: forward_kl(p, q),
            "reverse_kl": lambda p=log_p, q=log_q: reverse_kl(p, q),
            "tv": lambda p=log_p, q=log_q: total_variation(p, q),
            "lk": lambda p=log_p, q=log_q: -log_alpha(p, q),
            "hybrid": lambda p=log_p, q=log_q: hybrid(p, q, 3.0),
        }
        if family.kind in kinds:
            losses.append((weight * scales[k] * kinds[family.kind]() * target.valid).sum())
        if readout.feature is not None:
            each = F.smooth_l1_loss(readout.hidden, readout.feature.detach(), reduction="none").mean(-1)
            share = family.loss.feature * family.loss.decay ** (k - 1) * scales[k]
            losses.append((share * each * target.valid).sum())
        alphas.append(log_alpha(log_p, log_q).exp().flatten())
        chances.append(ratio(log_p.gather(-1, at), log_q.gather(-1, at)).flatten())
        counted.append(target.valid.flatten())
    if family.kind in ("tv_chain", "accept"):
        alpha, chance, valid = torch.stack(alphas), torch.stack(chances), torch.stack(counted)
        rejected = (
            rejected_by(alpha, valid) if family.kind == "tv_chain" else rejected_on_text(alpha, chance, valid)
        )
        shares = torch.stack([w * scales[k + 1] for k, w in enumerate(family.weights)])
        losses.append((shares[:, None] * rejected).sum())
    return sum(losses)


def assert_same(plan: Plan, rows) -> None:
    found, wanted = gradients(plan, rows), plain_gradients(plan, rows)
    assert set(found) <= set(wanted)
    for name, value in wanted.items():
        got = found.get(name, torch.zeros_like(value))
        torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert any(value.any() for value in wanted.values())


@pytest.mark.parametrize("at_once", [64 * 7, 2**26])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_all_heads_together_are_those_of_the_plain_sum(monkeypatch, tied, at_once):
    monkeypatch.setattr(readings, "LOGITS_AT_ONCE", at_once)
    assert_same(plan_of(tiny_network(tie_word_embeddings=tied).double()), packed())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sequential", "parallel", "eagle"])
def test_gradients_of_every_loss_of_every_head_are_those_of_the_plain_sum(name, kind, frozen):
    trunk = tiny_trunk().double()
    options = {"rollout": 3} if name == "eagle" else {"depth": 3}
    network = Network(trunk, {name: build_head(name, trunk, **options).double()})
    loss = HeadLoss(each=0.7, kind=kind, decay=0.8, feature=0.5 if name == "eagle" else 0.0)
    assert_same(plan_of(network, {name: loss}, frozen=frozen), packed())


@pytest.mark.parametrize("options", [{"form": "causal"}, {"form": "linear"}, {"tap": 0}])
def test_gradients_of_metas_variants_are_those_of_the_plain_sum(options):
    trunk = tiny_trunk().double()
    network = Network(trunk, {"parallel": build_head("parallel", trunk, depth=3, **options).double()})
    assert_same(plan_of(network, {"parallel": HeadLoss(each=1.0)}), packed())


def test_gradients_of_a_repeated_module_are_those_of_the_plain_sum():
    trunk = tiny_trunk().double()
    network = Network(trunk, {"sequential": build_head("sequential", trunk, depth=1, repeat=3).double()})
    assert_same(plan_of(network, {"sequential": HeadLoss(total=1.0, decay=0.6)}), packed())


def test_detached_heads_leave_the_trunks_weights_as_without_them():
    rows = packed()
    plain = gradients(plan_of(tiny_network(), {}), rows)
    names = tuple(name for name, loss in LOSSES.items() if loss)
    losses = {name: LOSSES[name] for name in names}
    found = gradients(plan_of(tiny_network(), losses, replace(OBJECTIVE, detach=names)), rows)
    for name, value in found.items():
        assert torch.equal(value, plain[name]) if name.startswith("trunk.") else value.isfinite().all(), name


def wide(layers: int, vocab_size: int, hidden_size: int) -> Trunk:
    torch.manual_seed(0)
    return Trunk(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
                num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
                max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
            )
        )
    )  # fmt: skip


def meta(layers: int, heads: int, vocab_size: int, hidden_size: int) -> Plan:
    """The paper's n = heads: the trunk's last layer is its head 1, the others are ours."""
    trunk = wide(layers, vocab_size, hidden_size)
    own = {"parallel": build_head("parallel", trunk, depth=heads - 1)} if heads > 1 else {}
    losses = {name: HeadLoss(each=1.0) for name in own}
    return plan_of(Network(trunk, own), losses)


def peak_bytes(run) -> int:
    """Most bytes that torch's allocator has given out at a time during run(), beyond what it had before.

    The profiler reports every allocation and release in order; their running sum is the memory in use.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    used = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        most = max(most, used)
    return most


@pytest.mark.parametrize("name", ["parallel", "sequential"])
def test_four_heads_at_a_vocabulary_of_32768_need_little_more_memory_than_one(name, monkeypatch):
    """Weights of the heads and their gradients aside: those of the trunk and its optimiser are the same."""
    monkeypatch.setattr(readings, "ON_CPU", readings.LOGITS_AT_ONCE)  # whole logits, as on a GPU
    peaks = {}
    for depth in (1, 4):
        trunk = wide(2, 32_768, 32)
        plan = plan_of(
            Network(trunk, {name: build_head(name, trunk, depth=depth)}), {name: HeadLoss(each=1.0)}
        )
        rows = packed(rows=4, length=64, vocab_size=32_768)
        scales = scales_of(plan, rows)
        plan.backward(rows, 0, scales)  # now every gradient has its place
        peaks[depth] = peak_bytes(lambda: plan.backward(rows, 0, scales))  # noqa: B023
    logits = 4 * 64 * 32_768 * 4
    assert peaks[1] > logits  # the measurement sees them
    assert peaks[4] <= 1.3 * peaks[1], (name, peaks)


@pytest.mark.slow
def test_a_step_with_four_heads_takes_little_more_time_than_with_one_at_the_papers_proportions():
    """32 layers in all and V = 8 H, as in the paper's models of 7 B: adding three heads takes three layers
    from the trunk. The least of several repeats, taken in turn."""
    plans = {1: meta(32, 1, 1024, 128), 4: meta(29, 4, 1024, 128)}
    rows = packed(rows=4, length=128, vocab_size=1024)
    least = dict.fromkeys(plans, float("inf"))
    for _ in range(7):
        for heads, plan in plans.items():
            start = time.perf_counter()
            plan.backward(rows, 0, scales_of(plan, rows))
            least[heads] = min(least[heads], time.perf_counter() - start)
    assert least[4] <= 1.3 * least[1], least


@pytest.mark.parametrize("name", ["sequential", "parallel", "eagle"])
def test_layers_that_are_run_again_instead_of_kept_give_the_same_gradients(name):
    found = []
    for again in (False, True):
        trunk = tiny_trunk()
        options = {"rollout": 3} if name == "eagle" else {"depth": 3}
        network = Network(trunk, {name: build_head(name, trunk, **options)}).train()
        if again:
            spare_memory(network)
        loss = HeadLoss(each=1.0, feature=float(name == "eagle"))
        found.append(gradients(plan_of(network, {name: loss}), packed()))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, msg=lambda m, k=key: f"{k}: {m}")
