"""What a training run's config may say, checked before anything is built: one sentence for each mistake."""

from pathlib import Path
from typing import Any

from mtp import UserError
from training.callbacks import SELECT
from training.optimization import check
from training.saving import SAVE
from training.start import stored_dtype
from training.trainer import PRECISIONS, STRATEGIES

KEYS = {
    "trunk", "heads", "objective", "data", "trainer",
    "out", "resume", "seed", "save", "save_dtype", "name", "run_dir",
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
COUNTS = ("log_every", "validate_every", "checkpoint_every", "nodes")
TAU = ("tau_prompts", "tau_prompt_tokens", "tau_new_tokens", "tau_draft_tokens")


def check_config(config: dict[str, Any]) -> None:
    if unknown := sorted(set(config) - KEYS):
        raise UserError(f"unknown key {unknown[0]}: the keys are {', '.join(sorted(KEYS))}")
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the network is saved")
    check_choice("save_dtype", config["save_dtype"], (None, *DTYPES))
    check_choice("save", config["save"], SAVE)
    if isinstance(config["seed"], bool) or not isinstance(config["seed"], int) or config["seed"] < 0:
        raise UserError(f"seed={config['seed']} is not a whole number from 0 on")
    for name, head in config["heads"].items():
        if not isinstance(head.get("loss"), (dict, type(None))):
            raise UserError(
                f"heads.{name}.loss={head['loss']} is neither null nor a group of keys, {{each:1.0}}"
            )
    check_trainer(config["trainer"], config["data"])
    check_together(config["trainer"], config["objective"])
    check_frozen(config, config["trunk"])


def check_trainer(setting: dict[str, Any], data: dict[str, Any]) -> None:
    check_choice("trainer.precision", str(setting["precision"]), PRECISIONS)
    check_choice("trainer.strategy", setting["strategy"], STRATEGIES)
    check_choice("trainer.select", setting["select"], SELECT)
    for key in (*COUNTS, *TAU):
        check(key, setting[key], 1, whole=True)
    if setting["tau_every"] is not None:
        check("tau_every", setting["tau_every"], 1, whole=True)
    elif setting["select"] == "tau":
        raise UserError("trainer.select=tau needs trainer.tau_every, how often the expected τ is measured")
    if setting["select"] == "loss" and data.get("max_validation_rows") == 0:
        raise UserError("trainer.select=loss needs validation, which data.max_validation_rows=0 turns off")


def check_together(setting: dict[str, Any], objective: dict[str, Any]) -> None:
    """What trainer.strategy=fsdp cannot do."""
    if setting["strategy"] != "fsdp":
        return
    if setting["tau_every"] is not None:
        raise UserError(
            "trainer.tau_every needs whole layers to decode with; trainer.strategy=fsdp shards them"
        )
    if objective["p_max"]:
        raise UserError(
            "objective.p_max drops layers in some processes only, which trainer.strategy=fsdp cannot"
        )
    if objective["gradient_every"] is not None:
        raise UserError("objective.gradient_every needs whole gradients, which trainer.strategy=fsdp shards")


def check_frozen(config: dict[str, Any], trunk: dict[str, Any]) -> None:
    if trunk["frozen"] and not trunk["path"]:
        raise UserError(
            "trunk.frozen=true needs trunk.path: a trunk from scratch that is frozen would stay untrained"
        )
    if config["save"] == "heads":
        if not trunk["frozen"] or not config["heads"]:
            raise UserError("save=heads needs trunk.frozen=true and a head: heads alone fit no other trunk")
        return
    if trunk["frozen"] and config["save_dtype"] not in (None, name_of(trunk["path"])):
        raise UserError(f"save_dtype={config['save_dtype']} would change the frozen trunk; leave it out")


def name_of(path: str) -> str:
    """The name of the dtype that a network folder is stored in."""
    return str(stored_dtype(path)).removeprefix("torch.")


def check_choice(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join("null" if choice is None else str(choice) for choice in allowed)
        raise UserError(f"{key}={value} is not one of {names}")


def is_saved(config: dict[str, Any]) -> bool:
    """Whether `out` holds what such a run leaves behind."""
    folders = [f"heads/{name}" for name in config["heads"]] if config["save"] == "heads" else ["."]
    return all(Path(config["out"], folder, "config.json").is_file() for folder in folders)
