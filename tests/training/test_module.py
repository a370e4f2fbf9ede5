import math
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import tiny_network, tiny_trunk
from torch.utils.data import DataLoader

from mtp import Network, UserError
from mtp.checkpoint import build_head
from training.losses import HeadLoss, Objective, cross_entropy, targets_at_depth
from training.module import Optimization, Training, targets_by_depth

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
    with torch.no_grad():
        terms = list(module.terms(rows["tokens"], 0))
        sums = module.measure(terms, targets_by_depth(rows, {term.readout.depth for term in terms}))
    return {name: value.tolist() for name, value in sums.items()}


def gradients(module: Training, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    module.zero_grad()
    terms = list(module.terms(rows["tokens"], 0))
    targets = targets_by_depth(rows, set(range(5)))
    scales = {depth: 1 / target.count.clamp(min=1) for depth, target in targets.items()}
    module.loss(terms, targets, scales).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_every_head_learns_the_token_that_far_ahead():
    trunk = tiny_trunk(layers=3, vocab_size=16)
    heads = {
        "sequential": build_head("sequential", trunk, depth=3),
        "parallel": build_head("parallel", trunk, depth=3),
        "early_exit": build_head("early_exit", trunk),
    }
    tokens = (torch.arange(24) + torch.arange(8)[:, None]) % 8  # a b c d e f g h a b …
    rows = {"tokens": tokens, "documents": torch.zeros_like(tokens)}
    module = fit(training(Network(trunk, heads), max_steps=120, lr=1e-2), [rows])
    with torch.no_grad():
        for term in module.terms(tokens, 0):
            said = trunk.lm_head(term.readout.hidden).argmax(-1)
            targets = targets_at_depth(tokens, rows["documents"], term.readout.depth)
            right = (said == targets.tokens)[targets.valid].float().mean()
            if term.weight == 0:  # the exit after the first layer: e(0) = 0 in the paper
                continue
            assert right > 0.99, term.name
            assert said[0, 10] == (10 + 1 + term.readout.depth) % 8, term.name


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
    targets = targets_by_depth(rows, set(range(5)))
    scales = {depth: 1 / target.count.clamp(min=1) for depth, target in targets.items()}
    module.zero_grad()
    for row in range(len(rows["tokens"])):
        part = {key: value[row : row + 1] for key, value in rows.items()}
        terms = list(module.terms(part["tokens"], 0))
        module.loss(terms, targets_by_depth(part, set(range(5))), scales).backward()
    return all(
        torch.allclose(p.grad, whole[name], rtol=1e-4, atol=1e-6)
        for name, p in module.named_parameters()
        if p.grad is not None
    )


def test_the_exit_loss_is_the_papers_and_takes_the_place_of_the_trunks_own():
    network, rows = tiny_network(), batch()
    module = training(network, {"early_exit": None})
    terms = list(module.terms(rows["tokens"], 0))
    weights = {term.name: term.weight for term in terms}
    scales = [0, 0.2, 0.6, 3 + 0.2 * 3]  # L = 4
    expected = dict(
        zip(["early_exit/layer1", "early_exit/layer2", "early_exit/layer3", "trunk"], scales, strict=True)
    )
    assert weights == pytest.approx({name: scale / sum(scales) for name, scale in expected.items()})
    states = network.trunk(rows["tokens"], taps=(2,), logits=False).states
    labels = targets_at_depth(rows["tokens"], rows["documents"], 0).labels
    by_hand = cross_entropy(network.trunk.norm(states[2]), network.trunk.model.lm_head.weight, labels)
    assert measured(module, rows)["early_exit/layer2"][0] == pytest.approx(by_hand.item(), rel=1e-5)


def test_layer_dropout_reaches_what_the_heads_read():
    network, rows = tiny_network(), batch()
    module = training(network)
    keep = torch.ones(4, 3, dtype=torch.bool)
    keep[1:, 1] = False
    with torch.no_grad():
        whole, dropped = (list(module.terms(rows["tokens"], 0, k)) for k in (None, keep))
    for one, two in zip(whole, dropped, strict=True):
        assert torch.allclose(one.readout.hidden[[0, 2]], two.readout.hidden[[0, 2]], atol=1e-5)
        if one.name not in ("early_exit/layer1",):
            assert not torch.allclose(one.readout.hidden[1], two.readout.hidden[1], atol=1e-3), one.name


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
