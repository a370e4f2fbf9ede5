import math
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import tiny_network, tiny_trunk
from torch.utils.data import DataLoader

from mtp import Network, UserError
from mtp.checkpoint import build_head
from training.losses import HeadLoss, Objective
from training.module import Optimization, Training
from training.packing import Rows, Stream
from training.targets import targets_at_depth, targets_by_depth

OBJECTIVE = Objective(e_scale=0.2, curriculum="none", rotation=1, p_max=0.0, dropout_schedule="constant")
OPTIMIZATION = Optimization(
    lr=3e-3,
    warmup_steps=2,
    lr_floor=0.1,
    max_steps=5,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    clip=1.0,
    micro_rows=None,
)
LOSSES = {"sequential": HeadLoss(total=0.3), "parallel": HeadLoss(each=1.0), "early_exit": None}


def training(network: Network, losses=LOSSES, objective=OBJECTIVE, *, frozen=False, **options) -> Training:
    return Training(network, losses, objective, replace(OPTIMIZATION, **options), frozen=frozen, log_every=2)


def fit(module: Training, batches: list, **options) -> Training:
    trainer = Trainer(
        accelerator="cpu", max_steps=module.optimization.max_steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


def batch(rows: int = 3, length: int = 12, seed: int = 0, vocab_size: int = 64) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "documents": torch.zeros_like(tokens)}


def measured(module: Training, rows: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """name -> sums of loss, targets, agreement, alpha."""
    return {name: value.tolist() for name, value in module.plan.measure(rows, 0).items()}


@torch.no_grad()
def readouts(module: Training, rows: dict[str, torch.Tensor], keep=None) -> dict:
    """name -> (readout, weight)."""
    plan, found = module.plan, {}
    states = plan.states(rows, keep)
    for family in plan.families(rows, 0):
        for readout, weight in zip(family.readouts(states), family.weights, strict=True):
            found[family.full_name(readout)] = (readout, weight)
    return found


def scales(module: Training, rows: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return dict(enumerate(1 / module.plan.counts(rows).clamp(min=1)))


def gradients(module: Training, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module.plan.backward(rows, 0, scales(module, rows))
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_every_head_learns_the_token_that_far_ahead():
    trunk = tiny_trunk(layers=2, vocab_size=16)
    heads = {
        "sequential": build_head("sequential", trunk, depth=2),
        "parallel": build_head("parallel", trunk, depth=2),
        "early_exit": build_head("early_exit", trunk),
    }
    tokens = (torch.arange(24) + torch.arange(8)[:, None]) % 8  # a b c d e f g h a b …
    rows = {"tokens": tokens, "documents": torch.zeros_like(tokens)}
    module = fit(training(Network(trunk, heads), max_steps=60, lr=1e-2), [rows])
    with torch.no_grad():
        for name, (readout, weight) in readouts(module, rows).items():
            said = trunk.lm_head(readout.hidden).argmax(-1)
            targets = targets_at_depth(tokens, rows["documents"], readout.depth)
            right = (said == targets.tokens)[targets.valid].float().mean()
            if weight == 0:  # the exit after the first layer: e(0) = 0 in the paper
                continue
            assert right > 0.99, name
            assert said[0, 10] == (10 + 1 + readout.depth) % 8, name


@pytest.mark.parametrize("name", ["sequential", "parallel", "early_exit"])
def test_no_readout_sees_the_token_that_it_predicts(network, name):
    trunk, head, tokens, place = network.trunk, network.heads[name], batch()["tokens"], 7
    other = tokens.clone()
    other[:, place] = (other[:, place] + 1) % 64
    with torch.no_grad():
        before, after = (
            head.readouts(trunk, x, trunk(x, taps=head.taps, logits=False).states) for x in (tokens, other)
        )
    for one, two in zip(before, after, strict=True):
        seen = (one.hidden != two.hidden).any(-1).any(0)
        first = place - one.depth if name != "parallel" else place
        assert not seen[: place - one.depth].any()  # position i predicts token i+1+depth
        assert seen[first]  # and every token before it is seen


def test_padding_and_its_ids_move_no_loss(network):
    module, rows = training(tiny_network()), batch(rows=2, length=10)
    plain = measured(module, rows)
    padded = {
        "tokens": torch.cat([rows["tokens"], torch.randint(64, (2, 40))], 1),
        "documents": torch.cat([rows["documents"], torch.full((2, 40), -1)], 1),
    }
    for name, sums in measured(module, padded).items():
        assert sums == pytest.approx(plain[name], rel=1e-4), name


def test_losses_lie_exactly_where_the_target_token_is_trained(network):
    module, rows = training(tiny_network()), batch(rows=1, length=6)
    rows["mask"] = torch.tensor([[False, False, False, True, True, True]])  # tokens 4 to 6
    for depth, targets in targets_by_depth(rows, {0, 1, 2}).items():
        assert targets.valid[0].nonzero()[:, 0].tolist() == [
            place for place in range(5 - depth) if place + 1 + depth >= 3
        ]
    assert measured(module, rows)["sequential/depth2"][1] == 3


def test_uniform_logits_cost_ln_v_at_every_depth():
    network = tiny_network()
    torch.nn.init.zeros_(network.trunk.model.lm_head.weight)
    rows = batch()
    rows["documents"][:, 8:] = -1
    for name, (loss, targets, _, alpha) in measured(training(network), rows).items():
        assert loss / targets == pytest.approx(math.log(64), rel=1e-5), name
        assert name == "trunk" or alpha == pytest.approx(targets)


def test_a_frozen_trunk_and_kept_heads_stay_bit_identical_while_the_head_moves():
    network = tiny_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    module = fit(training(network, {"sequential": HeadLoss(total=0.3)}, frozen=True), [batch()])
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("heads.sequential.") for name in changed)
    optimizer = module.configure_optimizers()
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in network.trunk.parameters()}


def test_nothing_to_train_is_refused():
    with pytest.raises(UserError, match="nothing to train"):
        training(tiny_network(), {"early_exit": None}, frozen=True)


def test_a_detached_head_that_is_not_trained_is_refused():
    with pytest.raises(UserError, match=r"objective.detach names medusa"):
        training(tiny_network(), objective=replace(OBJECTIVE, detach=("medusa",)))


def test_a_depth_without_targets_adds_nothing_and_spoils_nothing():
    network, rows = tiny_network(), batch(length=3)  # depths 2, 3 and 4 have no target
    module = training(network, max_steps=10)
    assert [measured(module, rows)[f"parallel/depth{k}"][:2] for k in (2, 3, 4)] == [[0, 0]] * 3
    found = gradients(module, rows)
    assert not any(value.any() for name, value in found.items() if "parallel.blocks.1" in name)
    fit(module, [rows])
    assert all(value.isfinite().all() for value in network.state_dict().values())


def test_a_detached_head_leaves_the_trunk_exactly_as_without_it():
    rows = batch()
    plain = gradients(training(tiny_network(), {}), rows)
    objective = replace(OBJECTIVE, detach=("parallel", "sequential"))
    losses = {name: LOSSES[name] for name in ("parallel", "sequential")}
    joined = gradients(training(tiny_network(), losses, objective), rows)
    for name, value in plain.items():
        assert torch.equal(value, joined[name]), name
    assert any(value.any() for name, value in joined.items() if "heads.parallel" in name)
    attached = gradients(training(tiny_network(), losses), rows)
    assert any(not torch.equal(value, attached[name]) for name, value in plain.items())


def test_micro_batches_of_unequal_targets_give_the_step_of_the_whole_batch():
    rows = batch(rows=5, length=12)
    rows["documents"][0, 3:] = -1
    rows["documents"][2, 9:] = -1
    whole, parts = (tiny_network(), tiny_network())
    layerskip = replace(OBJECTIVE, p_max=0.3)
    fit(training(whole, objective=layerskip, max_steps=1, lr=0.1), [rows])
    fit(training(parts, objective=layerskip, max_steps=1, lr=0.1, micro_rows=2), [rows])
    for one, two in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-3)
    assert gradients_agree(tiny_network(), rows)


def gradients_agree(network: Network, rows: dict[str, torch.Tensor]) -> bool:
    """Sums over rows with the whole batch's counts are the whole batch's gradients."""
    module = training(network)
    whole = gradients(module, rows)
    module.zero_grad()
    for row in range(len(rows["tokens"])):
        part = {key: value[row : row + 1] for key, value in rows.items()}
        module.plan.backward(part, 0, scales(module, rows))
    return all(
        torch.allclose(p.grad, whole[name], rtol=1e-4, atol=1e-6)
        for name, p in module.named_parameters()
        if p.grad is not None
    )


def test_the_exit_loss_is_the_papers_and_takes_the_place_of_the_trunks_own():
    network, rows = tiny_network(), batch()
    module = training(network, {"early_exit": None})
    weights = {name: weight for name, (_, weight) in readouts(module, rows).items()}
    scales = [0, 0.2, 0.6, 3 + 0.2 * 3]  # L = 4
    expected = dict(
        zip(["early_exit/layer1", "early_exit/layer2", "early_exit/layer3", "trunk"], scales, strict=True)
    )
    assert weights == pytest.approx({name: scale / sum(scales) for name, scale in expected.items()})
    states = network.trunk(rows["tokens"], taps=(2,), logits=False).states
    labels = targets_at_depth(rows["tokens"], rows["documents"], 0).labels
    logits = network.trunk.unembed(states[2]).flatten(0, 1)
    by_hand = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    assert measured(module, rows)["early_exit/layer2"][0] == pytest.approx(by_hand.item(), rel=1e-5)


def test_layer_dropout_reaches_what_the_heads_read():
    network, rows = tiny_network(), batch()
    module = training(network)
    keep = torch.ones(4, 3, dtype=torch.bool)
    keep[1:, 1] = False
    whole, dropped = (readouts(module, rows, k) for k in (None, keep))
    for name, (one, _) in whole.items():
        two = dropped[name][0]
        assert torch.allclose(one.hidden[[0, 2]], two.hidden[[0, 2]], atol=1e-5)
        if name != "early_exit/layer1":
            assert not torch.allclose(one.hidden[1], two.hidden[1], atol=1e-3), name


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_every_precision_trains_to_finite_weights(precision):
    network = tiny_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    fit(training(network, objective=replace(OBJECTIVE, p_max=0.5)), [batch()], precision=precision)
    assert all(
        value.isfinite().all() and value.dtype == torch.float32 for value in network.state_dict().values()
    )
    assert any(not torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_the_log_has_every_number_of_every_depth():
    told: dict[str, float] = {}
    module = training(tiny_network())
    module.reports = [lambda step, values: told.update(values)]
    fit(module, [batch()])
    for name in ("sequential/depth4", "parallel/depth1", "early_exit/layer3"):
        assert {f"train/{name}/{key}" for key in ("loss", "targets", "agreement", "alpha")} <= set(told)
    assert told["train/trunk/targets"] == 33
    assert told["train/parallel/depth4/targets"] == 3 * (12 - 1 - 4)
    assert "train/tokens_per_second" in told


def test_weight_decay_is_for_matrices_only():
    decayed, spared = training(tiny_network()).configure_optimizers().param_groups
    assert decayed["weight_decay"] == 0.1
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0
    assert all(p.ndim == 1 for p in spared["params"])


def test_states_from_disk_stand_in_for_a_frozen_trunk():
    """The trunk is not run: its layers are gone, and the gradients are the same."""
    rows, losses = batch(), {"parallel": HeadLoss(each=1.0), "sequential": HeadLoss(each=1.0, kind="kl")}
    network = tiny_network()
    module = training(network, losses, frozen=True)
    wanted, plain = gradients(module, rows), measured(module, rows)
    with torch.no_grad():
        given = network.trunk(rows["tokens"], taps=module.taps, logits=False).states
    brought = rows | {f"state_{tap}": state for tap, state in given.items()}
    for layer in network.trunk.layers:
        torch.nn.init.constant_(layer.mlp.down_proj.weight, float("nan"))
    found = gradients(module, brought)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert measured(module, brought) == plain
    fit(module, [brought])


def test_states_from_disk_are_refused_where_they_cannot_be_used():
    rows = batch()
    rows["state_4"] = torch.zeros(3, 12, 32)
    with pytest.raises(UserError, match="only a frozen trunk can be given"):
        gradients(training(tiny_network()), rows)
    with pytest.raises(UserError, match="but not state_3"):
        gradients(training(tiny_network(), {"parallel": HeadLoss(each=1.0)}, frozen=True), rows)


@pytest.mark.parametrize(
    ("name", "loss", "line"),
    [
        ("sequential", None, "has weights of its own"),
        ("early_exit", HeadLoss(each=1.0), "no weights of its own"),
    ],
)
def test_a_loss_that_does_not_fit_its_head_is_refused(name, loss, line):
    with pytest.raises(UserError, match=f"heads.{name}.loss .*{line}"):
        training(tiny_network(), {name: loss})


@pytest.mark.parametrize("adapter", ["norm", 8])
def test_an_adapter_makes_an_exit_of_a_frozen_trunk_better(adapter):
    trunk, rows = tiny_trunk(), batch()
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    network = Network(trunk, {"early_exit": build_head("early_exit", trunk, exit_layer=2, adapter=adapter)})
    losses = {"early_exit": HeadLoss(each=1.0, kind="kl")}
    module = training(network, losses, frozen=True, max_steps=40, lr=3e-2)
    alpha = measured(module, rows)["early_exit/layer2"][3]
    fit(module, [rows])
    assert measured(module, rows)["early_exit/layer2"][3] > alpha + 1
    assert all(torch.equal(value, before[name]) for name, value in trunk.state_dict().items())


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "tv", "lk", "hybrid", "tv_chain", "accept"])
def test_every_loss_of_acceptance_raises_it(kind):
    network, rows = tiny_network(), batch()
    losses = {"parallel": HeadLoss(each=1.0, kind=kind)}
    module = training(network, losses, frozen=True, max_steps=15, lr=2e-2)
    before = measured(module, rows)["parallel/depth1"]
    fit(module, [rows])
    after = measured(module, rows)["parallel/depth1"]
    assert after[3] / after[1] > before[3] / before[1] + 0.1


def test_a_draft_vocabulary_of_all_tokens_trains_as_none_does():
    rows, found = batch(), []
    for vocabulary in (None, 64):
        trunk = tiny_trunk()
        network = Network(trunk, {"parallel": build_head("parallel", trunk, draft_vocab=vocabulary)})
        found.append(gradients(training(network, {"parallel": HeadLoss(each=1.0)}), rows))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_a_small_draft_vocabulary_is_learned_within_its_limits():
    trunk, rows = tiny_trunk(), batch()
    network = Network(trunk, {"parallel": build_head("parallel", trunk, depth=2, draft_vocab=16)})
    module = training(
        network, {"parallel": HeadLoss(each=1.0, kind="tv")}, frozen=True, max_steps=40, lr=1e-2
    )
    before = measured(module, rows)["parallel/depth1"]
    with torch.no_grad():
        p = trunk(rows["tokens"]).logits.softmax(-1)[:, 1:-1]
        most = p[..., :16].sum().item()  # nothing else can be drafted
    fit(module, [rows])
    after = measured(module, rows)["parallel/depth1"]
    assert before[3] < after[3] <= most


def test_the_log_says_what_every_head_does_to_the_trunk():
    told: dict[str, float] = {}
    module = training(tiny_network(), objective=replace(OBJECTIVE, gradient_every=2))
    module.reports = [lambda step, values: told.update(values)]
    fit(module, [batch()])
    for name in ("trunk", "sequential", "parallel", "early_exit"):
        keys = ("tap_gradient_median", "tap_gradient_p99", "tap_gradient_spikes", "weight_gradient_norm")
        assert all(told[f"train/{name}/{key}"] >= 0 for key in keys)
        for key in ("tap_gradient_cosine", "weight_gradient_cosine"):
            assert name == "trunk" or -1 <= told[f"train/{name}/{key}"] <= 1


def test_comparing_gradients_changes_no_weight():
    networks = [tiny_network(), tiny_network()]
    for network, every in zip(networks, (None, 1), strict=True):
        objective = replace(OBJECTIVE, gradient_every=every, p_max=0.5)
        fit(training(network, objective=objective), [batch()])
    for one, two in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_bf16_true_training_keeps_the_rotary_frequencies_in_float32():
    network = tiny_network()
    rotary = network.trunk.model.model.rotary_emb
    kept = rotary.inv_freq.clone()
    seen = []
    module = training(network, {"sequential": HeadLoss(total=0.3), "parallel": HeadLoss(each=1.0, kind="tv")})
    module.on_train_batch_end = lambda *_: seen.append((network.trunk.dtype, rotary.inv_freq.clone()))
    fit(module, [batch()], precision="bf16-true")
    assert [dtype for dtype, _ in seen] == [torch.bfloat16] * 5
    assert all(torch.equal(frequencies, kept) for _, frequencies in seen)
    assert all(value.isfinite().all() for value in network.state_dict().values())


def test_under_autocast_every_weight_still_gets_its_gradient():
    """Autocast keeps casts of weights; one made without a graph must not serve where a graph is needed."""
    network, rows = tiny_network(), batch()
    losses = LOSSES | {"medusa": HeadLoss(each=1.0, kind="accept"), "eagle": HeadLoss(each=1.0, feature=1.0)}
    losses["sequential"] = HeadLoss(each=1.0, kind="tv_chain")
    module = training(network, losses)
    plain = gradients(module, rows)
    module.zero_grad()
    sums: dict = {}
    with torch.autocast("cpu", torch.bfloat16):
        for row in range(3):
            part = {key: value[row : row + 1] for key, value in rows.items()}
            module.plan.backward(part, 0, scales(module, rows), sums=sums)
    for name, parameter in module.named_parameters():
        if plain[name].norm() > 1e-2:
            size = (parameter.grad.norm() / plain[name].norm()).item()
            assert 0.8 < size < 1.25, (name, size)


@pytest.mark.parametrize(
    ("losses", "objective", "line"),
    [
        ({"parallel": HeadLoss(each=1.0, feature=1.0)}, OBJECTIVE, "heads.parallel.loss.feature=1.0 is for"),
        ({"parallel": HeadLoss(each=1.0)}, replace(OBJECTIVE, p_max=0.1), "objective.p_max=0.1 is about"),
        ({"parallel": HeadLoss(each=1.0)}, replace(OBJECTIVE, gradient_every=2), "gradient_every=2 is about"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(losses, objective, line):
    with pytest.raises(UserError, match=line):
        training(tiny_network(), losses, objective, frozen=True)


@pytest.mark.parametrize(
    ("option", "line"),
    [({"clip": 0.0}, "trainer.clip=0 would leave nothing"), ({"betas": (0.9, 1.5)}, "trainer.betas=")],
)
def test_numbers_that_no_training_survives_are_refused(option, line):
    with pytest.raises(UserError, match=line):
        replace(OPTIMIZATION, **option)


def test_a_depth_without_a_target_in_any_row_is_refused_before_the_first_step():
    """Rows of 4 tokens have targets at depths 0 to 2; rows handed in directly are looked at too."""
    rows = Rows(Stream(torch.arange(32).int().numpy(), torch.tensor([32]).numpy()), 4)
    module = training(tiny_network(), {"sequential": HeadLoss(each=1.0)}, frozen=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="in its row of 4, so depth 3 has no target; use longer rows"):
        trainer.fit(module, DataLoader(rows, batch_size=2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
