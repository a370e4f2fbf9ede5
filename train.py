"""Train a trunk, heads on it, or both, and save the network: `python train.py experiment=smoke`.

The run folder (`run_dir`) holds config.yaml, metrics.csv and checkpoints/last.ckpt; the network goes to
`out`. `resume=true` goes on from the checkpoint as if nothing had happened. Ctrl-C saves one.
"""

import os

# Threads that spin while they wait make a run ten times slower where other programs use the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import entry  # sets up Hydra's environment, which must come before Hydra

# isort: split
import dataclasses
import json
import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf

from mtp import Network, UserError
from training.losses import HeadLoss
from training.metrics import MetricsFile, Terminal
from training.module import Optimization, Training, check
from training.provenance import provenance
from training.start import head_provenance, load_network, new_network, stored_dtype, tokenizer_of

KEYS = {
    "trunk",
    "heads",
    "objective",
    "data",
    "trainer",
    "out",
    "resume",
    "seed",
    "save_dtype",
    "name",
    "run_dir",
}
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("auto", "32", "bf16-mixed", "bf16-true")


def train(config: dict[str, Any]) -> None:
    """One run, from the composed config as plain data."""
    check_config(config)
    quiet()
    run_dir, setting = Path(config["run_dir"]), config["trainer"]
    checkpoint = find_checkpoint(config["resume"], run_dir)
    torch.manual_seed(config["seed"])
    data = instantiate(config["data"])
    network = build_network(config["trunk"], config["heads"], data)
    first_step = read_step(checkpoint) if checkpoint else 0
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    with Terminal(setting["max_steps"], first_step) as terminal:
        metrics = MetricsFile(run_dir / "metrics.csv", first_step)
        module = build_module(config, network, [metrics, terminal])
        keeper = Checkpoints(run_dir / "checkpoints" / "last.ckpt", setting["checkpoint_every"])
        trainer = build_trainer(setting, keeper, data)
        reached = first_step >= setting["max_steps"]
        if reached:
            say(
                f"{checkpoint} is at step {first_step}: "
                f"trainer.max_steps={setting['max_steps']} is already reached"
            )
            if Path(config["out"], "config.json").is_file():
                return
            trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)
        else:
            fit(trainer, module, data, checkpoint, keeper)
    if trainer.is_global_zero:
        save(network, config, module.latest)


def check_config(config: dict[str, Any]) -> None:
    if unknown := sorted(set(config) - KEYS):
        raise UserError(f"unknown key {unknown[0]}: the keys are {', '.join(sorted(KEYS))}")
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the network is saved")
    check_choice("save_dtype", config["save_dtype"], (None, *DTYPES))
    check_choice("trainer.precision", str(config["trainer"]["precision"]), PRECISIONS)
    for key in ("log_every", "validate_every", "checkpoint_every"):
        check(key, config["trainer"][key], 1, whole=True)
    if isinstance(config["seed"], bool) or not isinstance(config["seed"], int) or config["seed"] < 0:
        raise UserError(f"seed={config['seed']} is not a whole number from 0 on")
    trunk = config["trunk"]
    if trunk["frozen"] and not trunk["path"]:
        raise UserError(
            "trunk.frozen=true needs trunk.path: a trunk from scratch that is frozen would stay untrained"
        )
    if trunk["frozen"] and config["save_dtype"] not in (
        None,
        str(stored_dtype(trunk["path"])).removeprefix("torch."),
    ):
        raise UserError(f"save_dtype={config['save_dtype']} would change the frozen trunk; leave it out")


def check_choice(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join("null" if choice is None else str(choice) for choice in allowed)
        raise UserError(f"{key}={value} is not one of {names}")


def find_checkpoint(resume: bool | str, run_dir: Path) -> Path | None:
    """The checkpoint to go on from: `true` is the run folder's own, anything else is a path."""
    if resume in (False, None):
        return None
    path = run_dir / "checkpoints" / "last.ckpt" if resume is True else Path(str(resume))
    if not path.is_file():
        raise UserError(
            f"resume={str(resume).lower() if resume is True else resume}: there is no checkpoint {path}"
        )
    return path


def read_step(checkpoint: Path) -> int:
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    except Exception as error:
        raise UserError(f"resume: {checkpoint} is not a whole checkpoint ({type(error).__name__})") from error


def build_network(trunk: dict[str, Any], heads: dict[str, Any], data: Any) -> Network:
    """Trunk, tokenizer and heads; those that the folder already has are kept unless they are trained here."""
    tokenizer = tokenizer_of(trunk["tokenizer"]) if trunk["tokenizer"] else None
    if trunk["path"]:
        network = load_network(trunk["path"], tokenizer)
    else:
        shape = instantiate(trunk["config"])
        if tokenizer is not None and len(tokenizer) != shape.vocab_size:
            raise UserError(
                f"trunk.config.vocab_size={shape.vocab_size}, but the tokenizer of {trunk['tokenizer']} "
                f"has {len(tokenizer)} symbols"
            )
        network = new_network(shape, tokenizer or data.train_tokenizer(shape.vocab_size))
    if data.row_length > network.trunk.context:
        raise UserError(
            f"data.row_length={data.row_length} is more than the trunk's context of {network.trunk.context}"
        )
    data.attach(network.tokenizer)
    if not trunk["frozen"]:
        for name in set(network.heads) - set(heads):
            say(f"head {name} of {trunk['path']} is left out: it belongs to the trunk as it was")
            del network.heads[name]
    for name, head in heads.items():
        options = {key: value for key, value in head.items() if key != "loss"}
        network.heads[name] = instantiate(options, trunk=network.trunk)
    return network


def build_module(config: dict[str, Any], network: Network, reports: list[Any]) -> Training:
    setting = config["trainer"]
    if setting["compile"]:
        for layer in network.trunk.layers:
            layer.compile()
    optimization = {field.name: setting[field.name] for field in dataclasses.fields(Optimization)}
    return Training(
        network,
        {name: head_loss(name, head["loss"]) for name, head in config["heads"].items()},
        instantiate(config["objective"]),
        Optimization(**optimization),
        frozen=config["trunk"]["frozen"],
        seed=config["seed"],
        log_every=setting["log_every"],
        reports=reports,
    )


def head_loss(name: str, loss: dict[str, float] | None) -> HeadLoss | None:
    if loss is None:
        return None
    if unknown := sorted(set(loss) - {"total", "each", "feature"}):
        raise UserError(f"heads.{name}.loss.{unknown[0]}: a loss has total or each, and feature")
    return HeadLoss(**loss)


def build_trainer(setting: dict[str, Any], keeper: "Checkpoints", data: Any) -> Trainer:
    cuda = torch.cuda.is_available() and setting["accelerator"] in ("auto", "gpu", "cuda")
    if cuda:
        torch.set_float32_matmul_precision("high")
    precision = str(setting["precision"])
    return Trainer(
        accelerator=setting["accelerator"] if setting["accelerator"] != "auto" else "cuda" if cuda else "cpu",
        devices=setting["devices"],
        # A head or an exit may be without a loss at some step, and its weights then without a gradient.
        strategy="auto" if setting["devices"] == 1 else "ddp_find_unused_parameters_true",
        precision=("bf16-mixed" if cuda else "32") if precision == "auto" else precision,
        max_steps=setting["max_steps"],
        min_epochs=0,
        max_epochs=-1,
        val_check_interval=setting["validate_every"],
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[keeper],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class Checkpoints(Callback):
    """Writes last.ckpt every so many steps, at the end, and after Ctrl-C.

    Ctrl-C ends the run after the step under way. The file is renamed into place, so it is always whole.
    """

    def __init__(self, path: Path, every: int):
        self.path, self.every, self.interrupted = path, every, False

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.before = signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        say("stopping after this step (Ctrl-C again: at once)")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        last = trainer.global_step >= trainer.max_steps
        if self.interrupted or last or trainer.global_step % self.every == 0:
            part = self.path.with_suffix(".part")
            trainer.save_checkpoint(part)
            if trainer.is_global_zero:
                os.replace(part, self.path)
        if self.interrupted:
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # nobody waits for a validation after Ctrl-C

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        signal.signal(signal.SIGINT, self.before)


def fit(trainer: Trainer, module: Training, data: Any, checkpoint: Path | None, keeper: Checkpoints) -> None:
    """Train to the end and validate; after Ctrl-C say how to go on and leave with status 130."""
    try:
        trainer.fit(module, data, ckpt_path=checkpoint)
    except SystemExit:  # Lightning's way out of a KeyboardInterrupt
        keeper.interrupted = True
    if keeper.interrupted:
        say(f"stopped; the checkpoint is {keeper.path}. To go on, add resume=true to the same command")
        sys.exit(130)
    if module.validated != trainer.global_step:
        trainer.validate(module, data, verbose=False)


def save(network: Network, config: dict[str, Any], latest: dict[str, float]) -> None:
    """Write the network folder; a head that was not trained here keeps its own provenance."""
    out, trunk = Path(config["out"]), config["trunk"]
    kept = (
        head_provenance(trunk["path"], sorted(set(network.heads) - set(config["heads"])))
        if trunk["path"]
        else {}
    )
    stored = stored_dtype(trunk["path"]) if trunk["path"] else torch.float32
    dtype = getattr(torch, config["save_dtype"]) if config["save_dtype"] else stored
    validation = {name: value for name, value in latest.items() if name.startswith("val/")}
    network.save_pretrained(out, dtype=dtype, provenance=provenance(config, validation))
    for name, value in kept.items():
        (out / "heads" / name / "provenance.json").write_text(
            json.dumps(value, indent=2, sort_keys=True) + "\n"
        )
    say(
        f"saved {out}"
        + "".join(f"\n  {name} {value:.4f}" for name, value in validation.items() if "loss" in name)
    )


def quiet() -> None:
    """Leave out what the libraries say about themselves."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in ("does not have many workers", "num_workers", "LeafSpec", "in eval mode", "ranks is zero"):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    entry.run(train, "train")
