import csv
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
from hydra.utils import get_method
from omegaconf import OmegaConf

import entry
import train
from mtp import Network, UserError
from training.config import KEYS
from training.losses import HeadLoss

ROOT = Path(__file__).parents[1]
GROUPS = ("trunk", "head", "objective", "trainer", "experiment")
VARIANTS = [(group, path.stem) for group in GROUPS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]


def composed(*overrides: str) -> dict:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return entry.plain(hydra.compose("train", overrides=list(overrides)))


def run(overrides: list[str], folder: Path, *more: str) -> dict[str, torch.Tensor]:
    """Train into `folder` and give all weights of the network that it saved."""
    train.train(composed(*overrides, f"out={folder}/network", f"run_dir={folder}", *more))
    return Network.from_pretrained(folder / "network").state_dict()


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def metrics(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row for row in csv.reader(file) if "tokens_per_second" not in row[1]]


@pytest.mark.parametrize(("group", "name"), VARIANTS)
def test_every_variant_composes(group, name):
    override = {"head": f"head=[{name}]", "experiment": f"+experiment={name}"}.get(group, f"{group}={name}")
    path = ["trunk.path=somewhere"] if name == "pretrained" else []
    config = composed(override.removeprefix("+"), *path)
    assert set(config) == KEYS


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "head").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_head_yaml_names_its_module_and_has_the_defaults_of_its_signature(path):
    assert path.read_text().startswith(f"# @package heads.{path.stem}\n")
    config = OmegaConf.to_container(OmegaConf.load(path))
    assert config.pop("_target_") == f"mtp.{path.stem}.build"
    assert (loss := config.pop("loss")) is None or HeadLoss(**loss).weights(2)
    parameters = list(inspect.signature(get_method(f"mtp.{path.stem}.build")).parameters.values())[1:]
    assert config == {parameter.name: parameter.default for parameter in parameters}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem
)
def test_an_experiment_file_begins_with_its_command(path):
    package, line = path.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert line == f"# python train.py experiment={path.stem}"


def test_a_list_of_heads_trains_them_all():
    assert set(composed("head=[sequential,parallel]")["heads"]) == {"sequential", "parallel"}
    assert composed("head=[]")["heads"] == {}


def test_a_resumed_run_equals_the_straight_one_bit_for_bit(overrides, tmp_path):
    straight = run(overrides, tmp_path / "straight")
    parts = tmp_path / "parts"
    with pytest.raises(SystemExit):
        stop_after(5, lambda: run(overrides, parts))
    assert list((parts / "checkpoints").iterdir()) == [parts / "checkpoints" / "last.ckpt"]
    resumed = run(overrides, parts, "resume=true")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert metrics(tmp_path / "straight") == metrics(parts)


def test_what_is_measured_also_goes_to_tensorboard(overrides, tmp_path, monkeypatch):
    """A stand-in for the logger, which is not installed with the rest."""
    told: dict[str, list[tuple[int, dict[str, float]]]] = {}

    def logger(folder, **options):
        assert folder == tmp_path
        log = told.setdefault(options["version"], [])
        return SimpleNamespace(log_metrics=lambda values, step: log.append((step, dict(values))), save=list)

    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    monkeypatch.setattr("lightning.pytorch.loggers.TensorBoardLogger", logger)
    run(overrides, tmp_path, "trainer.loggers=[tensorboard]")
    rows = {(int(step), name): float(value) for step, name, value in metrics(tmp_path)[1:]}
    logged = {(step, name): value for step, values in told["tensorboard"] for name, value in values.items()}
    assert len(rows) > 20
    assert {key: pytest.approx(logged[key], rel=1e-4) for key in rows} == rows


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_multirun_goes_through_the_launcher_that_the_configuration_names(overrides, tmp_path, launcher):
    """`hydra/launcher=submitit_slurm` is the same with another executor."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    folders = [f"out={tmp_path}/${{seed}}/network", f"run_dir={tmp_path}/${{seed}}"]
    places = f"hydra.launcher.submitit_folder={tmp_path}/jobs" if launcher != "joblib" else "seed=1,2"
    done = command("-m", f"hydra/launcher={launcher}", places, "seed=1,2", *overrides, *folders)
    assert done.returncode == 0, done.stderr
    one, two = (Network.from_pretrained(tmp_path / seed / "network").state_dict() for seed in "12")
    assert any(not torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_refused_by_name(overrides, tmp_path, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    options = [f"out={tmp_path}/network", f"run_dir={tmp_path}", f"trainer.loggers=[{name}]"]
    with pytest.raises(UserError, match=rf"trainer.loggers=\[{name}\] needs the package {name}: pip install"):
        train.train(composed(*overrides, *options))


def stop_after(step: int, function) -> None:
    """Call it with Ctrl-C coming during that training step."""
    original = train.Training.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == step - 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Training, "training_step", training_step)
        function()


def test_a_finished_run_leaves_a_safe_checkpoint_and_its_provenance(overrides, tmp_path, capsys):
    run(overrides, tmp_path, "save_dtype=bfloat16")
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    assert "=" not in checkpoint.name
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 7
    origin = json.loads((tmp_path / "network" / "heads" / "sequential" / "provenance.json").read_text())
    assert origin["config"]["data"]["row_length"] == 16
    assert origin["seed"] == 0
    assert {"command", "commit", "versions", "trunk"} <= set(origin)
    assert origin["validation"]["val/sequential/depth2/alpha"] > 0
    assert Network.from_pretrained(tmp_path / "network").trunk.dtype == torch.bfloat16
    assert OmegaConf.load(tmp_path / "config.yaml").trainer.max_steps == 7
    capsys.readouterr()
    run(overrides, tmp_path, "resume=true", "trainer.max_steps=6")
    assert "already reached" in capsys.readouterr().err


def test_heads_on_a_frozen_trunk_are_added_to_the_folder_and_the_rest_stays(overrides, tmp_path):
    before = run(overrides, tmp_path / "first", "save_dtype=bfloat16")
    source = tmp_path / "first" / "network"
    origin = (source / "heads" / "sequential" / "provenance.json").read_text()
    path = ["trunk=pretrained", f"trunk.path={source}", "head=[parallel]", "objective=default"]
    unsized = [override for override in overrides if not override.startswith(("trunk.config", "head"))]
    after = run([*unsized, *path], tmp_path / "second")
    assert all(torch.equal(before[name], after[name]) for name in before)
    added = {name.split(".")[1] for name in after.keys() - before.keys()}
    assert added == {"parallel"}
    second = tmp_path / "second" / "network" / "heads"
    assert json.loads((second / "sequential" / "provenance.json").read_text()) == json.loads(origin)
    assert json.loads((second / "parallel" / "provenance.json").read_text())["config"]["trunk"]["frozen"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["out=null"], "out is missing"),
        (["resume=true"], "no checkpoint"),
        (["resume=elsewhere.ckpt"], "elsewhere.ckpt"),
        (["save_dtype=int8"], "save_dtype=int8 is not one of null, float32, bfloat16, float16"),
        (["trainer.max_steps=abc"], "trainer.max_steps=abc is not a whole number from 1 on"),
        (["trainer.max_steps=true"], "trainer.max_steps=True"),
        (["trainer.lr=-1"], "trainer.lr=-1 is not a number from 0 on"),
        (["seed=-1"], "seed=-1"),
        (["trunk.frozen=true"], "trunk.frozen=true needs trunk.path"),
        (["trunk.path=nowhere/at/all"], "nowhere/at/all is not a network folder"),
        (["trunk.tokenizer=nowhere"], "trunk.tokenizer: nowhere is not a folder"),
        (["data.row_length=2000"], "data.row_length=2000 is more than the trunk's context of 1024"),
        (["objective.detach=[medusa]"], "objective.detach names medusa"),
        (["+foo=1"], "unknown key foo"),
        (["save=all"], "save=all is not one of network, heads"),
        (["save=heads"], "save=heads needs trunk.frozen=true and a head"),
        (["data.states=float16"], "data.states and data.self_distilled need trunk.frozen=true"),
        (["trainer.select=tau"], "trainer.select=tau needs trainer.tau_every"),
        (["trainer.select=best"], "trainer.select=best is not one of last, loss, tau"),
        (["trainer.strategy=zero"], "trainer.strategy=zero is not one of auto, ddp, fsdp"),
        (["trainer.strategy=fsdp", "trainer.tau_every=2"], "trainer.tau_every needs whole layers"),
        (["trainer.strategy=fsdp"], "objective.p_max drops layers in some processes only"),
        (
            ["trainer.strategy=fsdp", "objective=default", "objective.gradient_every=1"],
            "needs whole gradients",
        ),
        (["trainer.select=loss", "data.max_validation_rows=0"], "trainer.select=loss needs validation"),
        (["trainer.select=loss", "data.validation_fraction=0"], "have no documents for it"),
        (["heads.sequential.loss=5"], "heads.sequential.loss=5 is neither null nor a group"),
        (["trainer.tau_every=2", "trainer.tau_prompts=4000"], "trainer.tau_every=2: "),
        (["trainer.tau_every=2", "trainer.tau_prompt_tokens=1024"], "leaves no room in the trunk's context"),
        (["trainer.tau_every=0"], "trainer.tau_every=0 is not a whole number from 1 on"),
        (
            ["trainer.loggers=[mlflow]"],
            "trainer.loggers names mlflow, which is not one of tensorboard, wandb",
        ),
        (["+heads.sequential.loss.half=1"], "heads.sequential.loss.half"),
    ],
)
def test_a_mistake_is_told_by_its_key(overrides, tmp_path, more, line):
    options = [f"out={tmp_path}/network", f"run_dir={tmp_path}", *more]
    with pytest.raises(UserError, match=line.replace(".", r"\.")):
        train.train(composed(*overrides, *options))
    assert not (tmp_path / "network").exists()


def test_a_head_without_an_expected_tau_is_refused_where_it_is_asked_for(overrides, tmp_path):
    unsized = [one for one in overrides if not one.startswith(("head", "objective"))]
    options = ["head=[eagle]", "trainer.tau_every=2", f"out={tmp_path}/network", f"run_dir={tmp_path}"]
    with pytest.raises(UserError, match=r"trainer\.tau_every=2: no expected τ can be told of eagle"):
        train.train(composed(*unsized, *options))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["promt=x"], "unknown key promt"),
        (["trainer.max_step=3"], "did you mean trainer.max_steps?"),
        (["trunk=huge"], "trunk=huge is not one of pretrained"),
        (["out=x", "resume=true", "run_dir=nowhere"], "there is no checkpoint nowhere/checkpoints/last.ckpt"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_line(arguments, line, capsys):
    with pytest.raises(SystemExit) as ended:
        entry.run(train.train, "train", arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.count("\n") == 1
    assert line in printed.err
    assert printed.out == ""


@pytest.mark.slow  # a second of starting a program, for what the tests above see without
def test_the_command_itself_ends_with_status_2_and_one_line():
    done = command("promt=x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(overrides, tmp_path, capsys):
    options = [*overrides, f"out={tmp_path}/network", f"run_dir={tmp_path}", "trainer.max_steps=100000"]
    with pytest.raises(SystemExit) as ended:
        stop_after(3, lambda: entry.run(train.train, "train", options))
    told = capsys.readouterr().err
    assert ended.value.code == 130
    assert "add resume=true" in told
    assert "Traceback" not in told
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3


def wait_for(path: Path, text: str) -> None:
    for _ in range(600):
        if path.is_file() and text in path.read_text():
            return
        time.sleep(0.1)
    raise TimeoutError(path)
