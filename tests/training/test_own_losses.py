"""Heads with a matrix of their own (Medusa) or a state to foretell (EAGLE) learn it; the trunk stays."""

import torch
from lightning.pytorch import Trainer
from tiny import tiny_network, tiny_trunk
from torch.utils.data import DataLoader

from decoding import generate
from mtp import Network
from mtp.checkpoint import build_head
from training.losses import HeadLoss, Objective
from training.module import Optimization, Training
from training.targets import targets_at_depth

OBJECTIVE = {
    "e_scale": 0.2,
    "curriculum": "none",
    "rotation": 1,
    "p_max": 0.0,
    "dropout_schedule": "constant",
}
LOSSES = {"medusa": HeadLoss(each=1.0), "eagle": HeadLoss(each=0.1, feature=1.0)}


def training(network, losses=LOSSES, *, steps=5, frozen=False, detach=()) -> Training:
    setting = {"warmup_steps": 2, "lr_floor": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.95), "clip": 1.0}
    optimization = Optimization(lr=1e-2, max_steps=steps, micro_rows=None, **setting)
    return Training(
        network, losses, Objective(**OBJECTIVE, detach=detach), optimization, frozen=frozen, log_every=2
    )


def fit(module, rows) -> None:
    trainer = Trainer(
        accelerator="cpu", max_steps=module.optimization.max_steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([rows], batch_size=None))


def alphabet(rows: int = 8, length: int = 16) -> dict[str, torch.Tensor]:
    tokens = (torch.arange(length) + torch.arange(rows)[:, None]) % 8  # a b c d e f g h a b …
    return {"tokens": tokens, "documents": torch.zeros_like(tokens)}


def test_they_learn_and_then_draft_what_the_trunk_says():
    trunk, rows = tiny_trunk(layers=2, vocab_size=16), alphabet()
    heads = {"medusa": build_head("medusa", trunk, depth=3), "eagle": build_head("eagle", trunk)}
    module = training(Network(trunk, heads), steps=100)
    fit(module, rows)
    with torch.no_grad():
        states = module.plan.states(rows)
        families = list(module.plan.families(rows, 0))
        for name, readout in ((f.name, r) for f in families for r in f.readouts(states)):
            matrix = trunk.model.lm_head.weight if readout.matrix is None else readout.matrix
            targets = targets_at_depth(rows["tokens"], rows["documents"], readout.depth)
            right = ((readout.hidden @ matrix.T).argmax(-1) == targets.tokens)[targets.valid]
            assert right.float().mean() > 0.99, name
    network = module.network.eval()
    for name in LOSSES:
        (out,) = generate(network, [0, 1, 2, 3, 4, 5], drafter=name, num_draft_tokens=3, max_new_tokens=12)
        assert out.token_ids == [token % 8 for token in range(6, 18)]
        assert out.acceptance.alpha > 0.9, name


def gradients(module, rows):
    module.zero_grad()
    module.plan.backward(rows, 0, dict(enumerate(1 / module.plan.counts(rows).clamp(min=1))))
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_a_frozen_trunk_stays_bit_identical_while_they_move():
    network = tiny_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    fit(training(network, frozen=True), alphabet())
    changed = {
        name.split(".")[1] for name, v in network.state_dict().items() if not torch.equal(v, before[name])
    }
    assert changed == {"medusa", "eagle"}


def test_detached_they_leave_the_trunk_exactly_as_without_them():
    rows = alphabet()
    plain = gradients(training(tiny_network(), {}), rows)
    detached = gradients(training(tiny_network(), detach=("medusa", "eagle")), rows)
    for name, value in plain.items():
        assert torch.equal(value, detached[name]), name
    assert all(detached[f"network.heads.medusa.heads.{k}.lm_head.weight"].any() for k in range(4))
    assert detached["network.heads.eagle.fc.weight"].any()


def test_the_gradient_is_that_of_the_weighted_sum_of_cross_entropy_and_distance():
    network, rows = tiny_network(), alphabet()
    module = training(network, {"eagle": HeadLoss(each=0.1, feature=1.0)}, frozen=True)
    found = gradients(module, rows)
    module.zero_grad()
    states = network.trunk(rows["tokens"], taps=(4,), logits=False).states
    (readout,) = network.heads["eagle"].readouts(network.trunk, rows["tokens"], states)
    logits, label = network.trunk.lm_head(readout.hidden)[:, :-2], rows["tokens"][:, 2:]
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten())
    distance = torch.nn.functional.smooth_l1_loss(readout.hidden[:, :-2], states[4][:, 1:-1])
    (0.1 * entropy + distance).backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
