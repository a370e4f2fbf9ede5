"""What a run took, from what it left behind; and that what is there is not made again."""

import json

import pytest

from ablation.runs import Run, ensure_trained, peak, reset_peak
from ablation.text import described, loss
from ablation.training import curve, read_metrics, seconds
from decoding.forecast import Written
from mtp import UserError


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    return Run(
        {"out": str(folder / "network"), "run_dir": str(folder), "save": "network", "seed": 0, "heads": {}}
    )


def leave_checkpoint(run, content):
    checkpoint = run.folder / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    (run.folder / "config.id").write_text(content)
    return checkpoint


def test_what_is_trained_already_is_not_trained_again(run):
    (run.folder / "network").mkdir(parents=True)
    made = {"config": run.config | {"resume": True}}
    (run.folder / "network" / "provenance.json").write_text(json.dumps(made))
    ensure_trained(run, pytest.fail)


def test_heads_that_are_trained_already_are_not_trained_again(run):
    head = run.folder / "network" / "heads" / "parallel"
    head.mkdir(parents=True)
    (head / "provenance.json").write_text(json.dumps({"config": run.config}))
    ensure_trained(run, pytest.fail)


def test_a_training_that_was_stopped_goes_on(run):
    calls = []

    def stop(config):
        calls.append(config["resume"])
        checkpoint = run.folder / "checkpoints" / "last.ckpt"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.touch()
        raise SystemExit(130)

    for _ in range(2):
        with pytest.raises(SystemExit):
            ensure_trained(run, stop)
    assert calls == [False, True]


def test_a_checkpoint_of_another_config_is_not_gone_on_from(run):
    checkpoint, calls = leave_checkpoint(run, "another"), []
    ensure_trained(run, lambda config: calls.append((config["resume"], checkpoint.exists())))
    assert calls == [(False, False)]


def test_a_frozen_trunk_is_made_before_its_heads(run, tmp_path):
    heads = Run(
        run.config | {"run_dir": str(tmp_path / "heads"), "out": str(tmp_path / "heads/network")}, run
    )
    calls = []
    ensure_trained(heads, lambda config: calls.append(config["run_dir"]))
    assert calls == [run.config["run_dir"], str(tmp_path / "heads")]


def test_a_run_that_a_user_has_to_mend_is_told_as_it_is(run):
    def refuse(config):
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        ensure_trained(run, refuse)


def test_time_and_curve_are_those_of_the_metrics(tmp_path):
    lines = [
        "step,metric,value", "5,train/trunk/loss,4.0", "5,train/parallel/depth1/loss,5.0",
        "5,train/parallel/depth2/loss,7.0", "5,train/tokens_per_second,10.0", "10,val/trunk/loss,9.0",
        "10,train/tokens_per_second,50.0",
    ]  # fmt: skip
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert seconds(metrics, 10) == 5 + 1
    assert curve(metrics, 10, ["parallel"]) == [{"tokens": 50, "trunk": 4.0, "head": 6.0}]


def test_the_peak_is_at_least_what_was_held():
    reset_peak()
    block = bytearray(32 * 2**20)
    found = peak()
    assert found is None or found >= len(block)


def test_a_text_that_loops_is_seen():
    texts = [Written([9, *[1, 2] * 6], 1, 12), Written([9, *range(20, 32)], 1, 12)]
    found = described(texts)
    assert found["distinct"][0] == pytest.approx(14 / 24)
    assert found["repeated_4grams"] == pytest.approx((7 / 9 + 0) / 2)


def test_the_loss_is_that_of_the_laws():
    from tiny import successor_table, table_trunk

    from mtp import Network

    network = Network(table_trunk(successor_table([1, 2, 0])))
    assert loss(network, [[0, 1, 2, 0]]) < 1e-3
    assert loss(network, [[0, 1, 1, 0]]) > 5
