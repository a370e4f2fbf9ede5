"""One process and two train the same network; what was stopped in any way goes on as if it had not been."""

import csv
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import composed, metrics, run, wait_for

import train
from mtp import Network, UserError

ROOT = Path(__file__).parents[1]
STEPS = ["trainer.max_steps=5", "trainer.checkpoint_every=5", "trainer.validate_every=5"]


@pytest.fixture
def frozen(overrides, tmp_path) -> list[str]:
    """Overrides for heads on a frozen trunk that was trained for a moment."""
    run([*overrides, *STEPS], tmp_path / "first")
    unsized = [one for one in overrides if not one.startswith(("trunk.config", "head"))]
    path = ["trunk=pretrained", f"trunk.path={tmp_path / 'first' / 'network'}", "head=[sequential,parallel]"]
    return [*unsized, *path, "objective=default", "heads.sequential.depth=2", "heads.parallel.depth=2"]


def under_slurm(overrides: list[str], folder: Path, *more: str) -> dict[str, torch.Tensor]:
    """What `srun --ntasks 2 python train.py …` starts, with the variables that Lightning reads."""
    options = [*overrides, f"out={folder}/network", f"run_dir={folder}", "trainer.devices=2", *more]
    shared = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "15", "SLURM_NNODES": "1"}
    shared |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost", "OMP_NUM_THREADS": "1"}
    started = []
    for rank in "01":
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        command, environment = [sys.executable, "train.py", *options], os.environ | shared | own
        started.append(
            subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
        )
    for process in started:
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told[-3000:]
    return Network.from_pretrained(folder / "network").state_dict()


@pytest.mark.slow
def test_slurm_starts_the_processes_as_well(overrides, tmp_path):
    one = run([*overrides, *STEPS], tmp_path / "one", "data.batch_size=4")
    two = under_slurm([*overrides, *STEPS], tmp_path / "two", "data.batch_size=2")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_sharded_run_resumes_from_a_checkpoint_like_any_other(overrides, tmp_path):
    options = [*overrides, *STEPS, "objective=default", "trainer.select=loss"]
    more = ["resume=true", "trainer.max_steps=7"]
    run(options, tmp_path / "one", "data.batch_size=4")
    one = run(options, tmp_path / "one", "data.batch_size=4", *more)
    sharded = ["data.batch_size=2", "trainer.strategy=fsdp"]
    two_processes(options, tmp_path / "two", *sharded)
    two = two_processes(options, tmp_path / "two", *sharded, *more)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)


def two_processes(overrides: list[str], folder: Path, *more: str) -> dict[str, torch.Tensor]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    options = [*overrides, f"out={folder}/network", f"run_dir={folder}", "trainer.devices=2", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Network.from_pretrained(folder / "network").state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_two_processes_train_what_one_with_the_whole_batch_trains(
    request, overrides, tmp_path, kind, strategy
):
    options = request.getfixturevalue("frozen") if kind == "frozen" else overrides
    options = [*options, "objective=default"] if strategy == "fsdp" else options  # no layer dropout
    one = run([*options, *STEPS], tmp_path / "one", "data.batch_size=4")
    two = two_processes(
        [*options, *STEPS], tmp_path / "two", "data.batch_size=2", f"trainer.strategy={strategy}"
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)
    if kind == "frozen":
        before = Network.from_pretrained(tmp_path / "first" / "network").state_dict()
        assert all(torch.equal(two[name], before[name]) for name in before if name.startswith("trunk."))
        assert not any(torch.equal(two[name], before[name]) for name in before if "eh_proj" in name)


def test_thirteen_and_thirteen_and_fourteen_steps_are_forty(overrides, tmp_path):
    """The same examples, the same loss at every step, validation at step 26 where it stopped, one network."""
    steps = ["trainer.log_every=1", "trainer.validate_every=13", "trainer.checkpoint_every=13"]
    options, parts = [*overrides, *steps, "trainer.max_steps=40"], tmp_path / "parts"
    straight, whole = seen(0, lambda: run(options, tmp_path / "straight"))
    examples = []
    for until, resume in ((13, "false"), (26, "true"), (0, "true")):
        resumed, some = seen(until, lambda: run(options, parts, f"resume={resume}"))  # noqa: B023
        examples += some
    assert [len(whole), examples] == [40, whole]
    assert metrics(tmp_path / "straight") == metrics(parts)
    assert len([row for row in metrics(parts) if row[1] == "train/trunk/loss"]) == 40
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def seen(stop: int, function) -> tuple[dict[str, torch.Tensor] | None, list[list[list[int]]]]:
    """What it returns, None if it left, and every step's examples; with Ctrl-C coming during step `stop`."""
    original, examples = train.Training.training_step, []

    def training_step(self, batch, batch_idx):
        examples.append(batch["tokens"].tolist())
        if self.global_step == stop - 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Training, "training_step", training_step)
        if not stop:
            return function(), examples
        with pytest.raises(SystemExit):
            function()
    return None, examples


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(overrides, tmp_path):
    steps = ["trainer.max_steps=300", "trainer.checkpoint_every=3", "trainer.validate_every=300"]
    options = [*overrides, *steps, f"out={tmp_path}/run/network", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen([sys.executable, "train.py", *options], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "run" / "metrics.csv", "\n8,train/trunk/loss")
    process.kill()
    process.wait()
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    (checkpoint.parent / "last.part").write_bytes(b"what a kill in the middle of writing leaves")
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert 0 < step < 300
    assert step % 3 == 0
    seen(step + 4, lambda: run([*overrides, *steps], tmp_path / "straight"))
    seen(step + 4, lambda: run([*overrides, *steps], tmp_path / "run", "resume=true"))
    straight, resumed = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)
        for name in ("straight", "run")
    )
    assert straight["global_step"] == resumed["global_step"] == step + 4
    for name, value in straight["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name
    one, two = (each["optimizer_states"][0]["state"] for each in (straight, resumed))
    for number, moments in one.items():
        assert all(torch.equal(two[number][key], value) for key, value in moments.items())


def test_a_checkpoint_of_another_network_is_refused_in_one_sentence(frozen, tmp_path):
    run([*frozen, *STEPS], tmp_path / "run")
    for other in ("heads.parallel.depth=3", "heads.sequential.depth=1", "trunk.frozen=false"):
        options = ["resume=true", "trainer.max_steps=7", f"out={tmp_path}/n", f"run_dir={tmp_path}/run"]
        with pytest.raises(UserError, match=r"last\.ckpt is of another network: network"):
            train.train(composed(*frozen, *STEPS, *options, other))


def test_a_finished_run_whose_network_is_gone_saves_it_again_with_its_numbers(frozen, tmp_path, capsys):
    options = [*frozen, *STEPS, "save=heads", "trainer.select=loss", f"out={tmp_path}/heads"]
    config = composed(*options, f"run_dir={tmp_path}/run")
    train.train(config)
    before, lines = contents(tmp_path / "heads"), metrics(tmp_path / "run")
    capsys.readouterr()
    train.train(config | {"resume": True})
    told = capsys.readouterr().err
    assert "already reached" in told
    assert "saved" not in told
    shutil.rmtree(tmp_path / "heads")
    train.train(config | {"resume": True})
    assert contents(tmp_path / "heads") == before
    assert metrics(tmp_path / "run")[: len(lines)] == lines


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
def test_states_on_disk_train_what_the_trunk_itself_trains(frozen, tmp_path, precision):
    options, kept = [*frozen, *STEPS, f"trainer.precision={precision}"], ["data.states=float32"]
    plain = run(options, tmp_path / "plain")
    found = run(options, tmp_path / "kept", *kept)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    if precision == "32":
        run(options, tmp_path / "kept", *kept, "resume=true", "trainer.max_steps=7")


def test_heads_alone_are_saved_and_decode_with_their_trunk(frozen, tmp_path):
    config = composed(*frozen, *STEPS, "save=heads", f"out={tmp_path}/grafted", f"run_dir={tmp_path}/run")
    train.train(config)
    assert sorted(path.name for path in (tmp_path / "grafted").iterdir()) == ["heads"]
    both = Network.from_pretrained(tmp_path / "first" / "network", heads=tmp_path / "grafted")
    assert {"sequential", "parallel"} <= set(both.heads)


def test_the_best_network_by_expected_tau_is_what_is_saved(frozen, tmp_path, capsys):
    watch = ["trainer.tau_every=1", "trainer.tau_prompts=3", "trainer.tau_prompt_tokens=4"]
    watch += ["trainer.tau_new_tokens=12", "trainer.select=tau", "trainer.max_steps=6", "trainer.lr=0.05"]
    saved = run([*frozen, *STEPS, *watch], tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.reader(file) if row[1].startswith("val/tau_")]
    by_step: dict[int, list[float]] = {}
    for step, _, value in rows:
        by_step.setdefault(int(step), []).append(float(value))
    means = {step: sum(values) / len(values) for step, values in by_step.items()}
    best = max(means, key=means.get)
    assert sorted(by_step) == [1, 2, 3, 4, 5, 6]
    assert all(len(values) == 4 for values in by_step.values())
    assert f"is that of step {best}" in capsys.readouterr().err
    until = [f"trainer.max_steps={best}", "trainer.select=last", "trainer.lr=0.05"]
    assert saved.keys() == run([*frozen, *STEPS, *until], tmp_path / "short").keys()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_and_recomputed_layers_train_and_stay_finite(overrides, tmp_path, precision):
    options = [f"trainer.precision={precision}", "trainer.activation_checkpointing=true"]
    saved = run([*overrides, *STEPS], tmp_path, *options)
    assert all(bool(value.isfinite().all()) for value in saved.values())


def test_recomputed_layers_change_nothing(overrides, tmp_path):
    plain = run([*overrides, *STEPS], tmp_path / "plain")
    again = run([*overrides, *STEPS], tmp_path / "again", "trainer.activation_checkpointing=true")
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_layers_train_what_plain_ones_train(overrides, tmp_path):
    """The losses, that is: where a gradient is next to nothing, AdamW makes much of its rounding."""
    options = [*overrides, *STEPS, "objective=default", "trunk.config.num_hidden_layers=2"]
    plain = run(options, tmp_path / "plain")
    compiled = run(options, tmp_path / "compiled", "trainer.compile=true")
    assert compiled.keys() == plain.keys()
    rows = [metrics(tmp_path / name)[1:] for name in ("plain", "compiled")]
    assert len(rows[0]) == len(rows[1]) > 20
    for (step, name, value), other in zip(*rows, strict=True):
        assert other[:2] == [step, name]
        assert float(other[2]) == pytest.approx(float(value), rel=2e-3, abs=1e-4), name
