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
from decoding.forecast import Forecast, Foretold
from mtp import Network, UserError
from mtp.checkpoint import fingerprint
from mtp.draft_vocab import keep_frequent
from mtp.network import resolve
from training.callbacks import Best, Checkpoints, Watch
from training.config import check_config, is_saved
from training.losses import HeadLoss
from training.metrics import MetricsFile, Terminal
from training.module import Optimization, Training
from training.progress import say, tell
from training.resume import check_fits, find_best, find_checkpoint, read_step
from training.saving import save
from training.self_distilled import ContinueText
from training.sharding import whole_state
from training.start import load_network, new_network, tokenizer_of
from training.trainer import build_trainer, compile_layers, other_logs, spare_memory


def train(config: dict[str, Any]) -> None:
    """One run, from the composed config as plain data."""
    check_config(config)
    quiet()
    run_dir, setting = Path(config["run_dir"]), config["trainer"]
    checkpoint = find_checkpoint(config["resume"], run_dir)
    first_step = read_step(checkpoint)
    torch.manual_seed(config["seed"])
    data = instantiate(config["data"])
    network = build_network(config["trunk"], config["heads"], data)
    run_dir.mkdir(parents=True, exist_ok=True)
    logs = other_logs(setting["loggers"], run_dir, config["name"])
    with Terminal(setting["max_steps"], first_step) as terminal:
        module = build_module(config, network, [terminal, *logs])
        check_fits(checkpoint, module)
        attach_trunk(config["trunk"], module, data)
        keeper = Checkpoints(
            run_dir / "checkpoints" / "last.ckpt", setting["checkpoint_every"], setting["validate_every"]
        )
        best = find_best(setting["select"], keeper.path.with_name("best.ckpt"), checkpoint, first_step)
        watch = find_watch(setting, config["trunk"]["frozen"], module, data, best)
        check_validates(setting, data)
        trainer = build_trainer(setting, [each for each in (watch, best, keeper) if each is not None])
        if first_step >= setting["max_steps"]:
            most = setting["max_steps"]
            tell(f"{checkpoint} is at step {first_step}: trainer.max_steps={most} is already reached")
            if is_saved(config):
                return
        module.reports.append(MetricsFile(run_dir / "metrics.csv", first_step))
        OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
        fit(trainer, module, data, checkpoint, keeper)
    finish(config, trainer, module, data, best)


def finish(config: dict[str, Any], trainer: Trainer, module: Training, data: Any, best: Best | None) -> None:
    """Save the network, the last or the best one, and say how good it is."""
    network, validation = module.network, module.latest
    if config["trainer"]["strategy"] == "fsdp":
        state = whole_state(network)
        network = build_network(config["trunk"], config["heads"], data)
        network.load_state_dict(state)
    if best is not None and best.path.is_file():
        validation = best.restore(network)
    if trainer.is_global_zero:
        validation = {name: value for name, value in validation.items() if name.startswith("val/")}
        save(network, config, validation)
        numbers = (f"\n  {name} {value:.4f}" for name, value in validation.items() if told(name))
        say(f"saved {config['out']}" + "".join(numbers))


def told(metric: str) -> bool:
    return "loss" in metric or "/tau_" in metric


def check_validates(setting: dict[str, Any], data: Any) -> None:
    if setting["select"] == "loss" and not data.validates:
        raise UserError("trainer.select=loss needs validation, and the data have no documents for it")


def find_watch(
    setting: dict[str, Any], frozen: bool, module: Training, data: Any, best: Best | None
) -> Watch | None:
    """What measures the expected τ, if it is asked for; what cannot be measured is told here, not later."""
    if setting["tau_every"] is None:
        return None
    size, most = setting["tau_prompt_tokens"], module.network.trunk.context
    if size >= most:
        raise UserError(f"trainer.tau_prompt_tokens={size} leaves no room in the trunk's context of {most}")
    try:
        prompts = data.validation_prompts(setting["tau_prompts"], size)
        heads, length = sorted(module.plan.losses), setting["tau_draft_tokens"]
        most = setting["tau_new_tokens"]
        forecast = Forecast(
            module.network, prompts, heads=heads, length=length, new_tokens=most, frozen=frozen
        )
    except UserError as error:
        raise UserError(f"trainer.tau_every={setting['tau_every']}: {error}") from error
    for name in sorted(set(heads) - set(forecast.heads)):
        tell(f"the expected τ is not told of {name}: its draft feeds on what it drafted itself")
    return Watch(lambda: as_metrics(forecast()), setting["tau_every"], best)


def as_metrics(found: dict[str, dict[float, Foretold]]) -> dict[str, float]:
    """What decoding validation prompts greedily, and at temperature 1, would give."""
    values: dict[str, float] = {}
    for name, by_temperature in found.items():
        greedy, sampled = by_temperature[0.0], by_temperature[1.0]
        values |= {f"val/tau_greedy/{name}": greedy.tau, f"val/tau_sampled/{name}": sampled.tau}
        for depth, share in enumerate(sampled.acceptance, start=1):
            values[f"val/accept/{name}/depth{depth}"] = share
    return values


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
            tell(f"head {name} of {trunk['path']} is left out: it belongs to the trunk as it was")
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
        compile_layers(network.trunk.layers)
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
        tell(f"stopped; the checkpoint is {keeper.path}. To go on, add resume=true to the same command")
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


if __name__ == "__main__":
    entry.run(train, "train")
