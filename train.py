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
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from decoding import Sampling, generate
from decoding.forecast import Forecast
from mtp import Network, UserError
from mtp.checkpoint import fingerprint
from mtp.draft_vocab import keep_frequent
from mtp.network import resolve
from training.callbacks import SELECT, Best, Checkpoints, Measure, Watch
from training.losses import HeadLoss
from training.metrics import MetricsFile, Terminal
from training.module import Optimization, Training, check
from training.saving import SAVE, save
from training.self_distilled import ContinueText
from training.sharding import whole_state
from training.start import load_network, new_network, stored_dtype, tokenizer_of
from training.trainer import PRECISIONS, STRATEGIES, build_trainer, other_logs, spare_memory

KEYS = {
    "trunk",
    "heads",
    "objective",
    "data",
    "trainer",
    "out",
    "resume",
    "seed",
    "save",
    "save_dtype",
    "name",
    "run_dir",
}
DTYPES = ("float32", "bfloat16", "float16")


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
    logs = other_logs(setting["loggers"], run_dir, config["name"])
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    with Terminal(setting["max_steps"], first_step) as terminal:
        metrics = MetricsFile(run_dir / "metrics.csv", first_step)
        module = build_module(config, network, [metrics, terminal, *logs])
        attach_trunk(config["trunk"], module, data)
        keeper = Checkpoints(run_dir / "checkpoints" / "last.ckpt", setting["checkpoint_every"])
        best = find_best(setting["select"], keeper.path.with_name("best.ckpt"), checkpoint, first_step)
        watch = find_watch(setting, config["trunk"]["frozen"], module, data, best)
        trainer = build_trainer(setting, [each for each in (watch, best, keeper) if each is not None])
        if first_step >= setting["max_steps"]:
            say(
                f"{checkpoint} is at step {first_step}: "
                f"trainer.max_steps={setting['max_steps']} is already reached"
            )
            if Path(config["out"], "config.json").is_file():
                return
            trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)
        else:
            fit(trainer, module, data, checkpoint, keeper)
    validation = best.restore(module) if best is not None else module.latest
    if setting["strategy"] == "fsdp":
        state = whole_state(network)
        network = build_network(config["trunk"], config["heads"], data)
        network.load_state_dict(state)
    if trainer.is_global_zero:
        validation = {name: value for name, value in validation.items() if name.startswith("val/")}
        save(network, config, validation)
        numbers = (f"\n  {name} {value:.4f}" for name, value in validation.items() if told(name))
        say(f"saved {config['out']}" + "".join(numbers))


def told(metric: str) -> bool:
    return "loss" in metric or "/tau_" in metric


def check_config(config: dict[str, Any]) -> None:
    if unknown := sorted(set(config) - KEYS):
        raise UserError(f"unknown key {unknown[0]}: the keys are {', '.join(sorted(KEYS))}")
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the network is saved")
    setting, trunk = config["trainer"], config["trunk"]
    check_choice("save_dtype", config["save_dtype"], (None, *DTYPES))
    check_choice("save", config["save"], SAVE)
    check_choice("trainer.precision", str(setting["precision"]), PRECISIONS)
    check_choice("trainer.strategy", setting["strategy"], STRATEGIES)
    check_choice("trainer.select", setting["select"], SELECT)
    for key in ("log_every", "validate_every", "checkpoint_every", "nodes", *TAU):
        if key != "tau_every" or setting[key] is not None:
            check(key, setting[key], 1, whole=True)
    if setting["select"] == "tau" and setting["tau_every"] is None:
        raise UserError("trainer.select=tau needs trainer.tau_every, how often the expected τ is measured")
    if setting["strategy"] == "fsdp" and setting["tau_every"] is not None:
        raise UserError(
            "trainer.tau_every needs whole layers to decode with; trainer.strategy=fsdp shards them"
        )
    if setting["strategy"] == "fsdp" and config["objective"]["p_max"]:
        raise UserError(
            "objective.p_max drops layers in some processes only, which trainer.strategy=fsdp cannot"
        )
    if isinstance(config["seed"], bool) or not isinstance(config["seed"], int) or config["seed"] < 0:
        raise UserError(f"seed={config['seed']} is not a whole number from 0 on")
    check_frozen(config, trunk)


TAU = ("tau_every", "tau_prompts", "tau_prompt_tokens", "tau_new_tokens", "tau_draft_tokens")


def check_frozen(config: dict[str, Any], trunk: dict[str, Any]) -> None:
    if trunk["frozen"] and not trunk["path"]:
        raise UserError(
            "trunk.frozen=true needs trunk.path: a trunk from scratch that is frozen would stay untrained"
        )
    if config["save"] == "heads":
        if not trunk["frozen"] or not config["heads"]:
            raise UserError("save=heads needs trunk.frozen=true and a head: heads alone fit no other trunk")
        return
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


def find_best(select: str, path: Path, checkpoint: Path | None, first_step: int) -> Best | None:
    """What keeps the best network, knowing what the run that goes on had found by then."""
    if select == "last":
        return None
    best = Best(path, select)
    best.recall(first_step if checkpoint is not None and checkpoint.parent == path.parent else 0)
    return best


def find_watch(
    setting: dict[str, Any], frozen: bool, module: Training, data: Any, best: Best | None
) -> Watch | None:
    """What measures the expected τ, if it is asked for."""
    if setting["tau_every"] is None:
        return None
    return Watch(expected_tau(module, data, setting, frozen), setting["tau_every"], best)


def expected_tau(module: Training, data: Any, setting: dict[str, Any], frozen: bool) -> Measure:
    """Measures what decoding validation prompts greedily, and at temperature 1, would give."""
    made: list[Forecast] = []

    def measure() -> dict[str, float]:
        if not made:
            prompts = data.validation_prompts(setting["tau_prompts"], setting["tau_prompt_tokens"])
            heads, length = sorted(module.plan.losses), setting["tau_draft_tokens"]
            most = setting["tau_new_tokens"]
            made.append(
                Forecast(module.network, prompts, heads=heads, length=length, new_tokens=most, frozen=frozen)
            )
        values: dict[str, float] = {}
        for name, (greedy, sampled) in ((n, (by[0.0], by[1.0])) for n, by in made[0]().items()):
            values |= {f"val/tau_greedy/{name}": greedy.tau, f"val/tau_sampled/{name}": sampled.tau}
            for depth, share in enumerate(sampled.acceptance, start=1):
                values[f"val/accept/{name}/depth{depth}"] = share
        return values

    return measure


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
        if network.heads[name].options.get("draft_vocab") is not None:
            keep_frequent(network.heads[name], data.token_counts(network.trunk.vocab_size))
    return network


def build_module(config: dict[str, Any], network: Network, reports: list[Any]) -> Training:
    setting = config["trainer"]
    if setting["activation_checkpointing"]:
        spare_memory(network)
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


def head_loss(name: str, loss: dict[str, Any] | None) -> HeadLoss | None:
    if loss is None:
        return None
    known = [field.name for field in dataclasses.fields(HeadLoss)]
    if unknown := sorted(set(loss) - set(known)):
        raise UserError(f"heads.{name}.loss.{unknown[0]}: a loss has {', '.join(known)}")
    return HeadLoss(**loss)


def attach_trunk(trunk: dict[str, Any], module: Training, data: Any) -> None:
    """Give the data what it needs of the trunk, if it needs something."""
    if not data.needs_trunk:
        return
    if not trunk["frozen"]:
        raise UserError(
            "data.states and data.self_distilled need trunk.frozen=true: they are written once, "
            "by a trunk that does not change"
        )
    network, of_files = module.network, fingerprint(resolve(trunk["path"]))
    data.attach_trunk(network.trunk, of_files, module.taps, continue_with(network))


def continue_with(network: Network) -> ContinueText:
    """The project's own decoding, for data that the trunk writes."""

    def continue_text(
        prompts: list[list[int]], seeds: list[int], temperature: float, most: int
    ) -> list[list[int]]:
        sampling = Sampling(temperature=temperature)
        done = generate(network, prompts, sampling=sampling, max_new_tokens=most, seed=seeds)
        return [one.token_ids for one in done]

    return continue_text


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
