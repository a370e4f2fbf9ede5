"""How a run is carried out: devices, processes, precision, memory, and who else is told the numbers."""

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from mtp import UserError
from training.module import Report

PRECISIONS = ("auto", "32", "bf16-mixed", "bf16-true")
STRATEGIES = ("auto", "ddp", "fsdp")
LOGGERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}  # and what they need, one of


def build_trainer(setting: dict[str, Any], callbacks: list[Callback]) -> Trainer:
    cuda = torch.cuda.is_available() and setting["accelerator"] in ("auto", "gpu", "cuda")
    if cuda:
        torch.set_float32_matmul_precision("high")
    precision = str(setting["precision"])
    return Trainer(
        accelerator=setting["accelerator"] if setting["accelerator"] != "auto" else "cuda" if cuda else "cpu",
        devices=setting["devices"],
        num_nodes=setting["nodes"],
        strategy=strategy(setting["strategy"], processes(setting, cuda)),
        precision=("bf16-mixed" if cuda or has_amx() else "32") if precision == "auto" else precision,
        max_steps=setting["max_steps"],
        min_epochs=0,
        max_epochs=-1,
        val_check_interval=setting["validate_every"],
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the data share rows out; a sampler would count some twice
        callbacks=[SumsItsOwnGradients(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware: some eight times as fast as float32 ones."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.6
    return capabilities is not None and bool(capabilities().get("amx_bf16"))


def processes(setting: dict[str, Any], cuda: bool) -> int:
    """How many there are on all nodes; -1 and auto devices are all that a node has."""
    of_node = setting["devices"]
    if not isinstance(of_node, int) or of_node < 0:
        of_node = torch.cuda.device_count() if cuda else 1
    return of_node * setting["nodes"]


def strategy(name: str, count: int) -> Any:
    """One process needs none. FSDP2 puts checkpoints together, so that they are like any other."""
    if name == "fsdp":
        return ModelParallelStrategy(
            data_parallel_size=count, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    return DDPStrategy() if count > 1 or name == "ddp" else "auto"


class SumsItsOwnGradients(Callback):
    """Keeps DDP from adding up gradients: it expects one backward pass a step, the module has many and adds
    up itself."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if isinstance(trainer.model, DistributedDataParallel):
            trainer.model.require_backward_grad_sync = False


def spare_memory(network: nn.Module) -> None:
    """Let every decoder layer, of trunk and heads, be run again in the backward pass instead of kept."""
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    for layer in network.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, again


def compile_layers(layers: nn.ModuleList) -> None:
    """torch.compile every layer, in place.

    Where families' gradients are compared at the taps, layers go backward twice through one graph, whose
    buffers must therefore not be given away the first time.
    """
    functorch_config.donated_buffer = False
    for layer in layers:
        layer.compile()


def other_logs(names: Sequence[str], run_dir: Path, run_name: str) -> list[Report]:
    """TensorBoard and Weights & Biases, beside metrics.csv; UserError for one that is not installed."""
    return [log_to(name, run_dir, run_name) for name in names]


def log_to(name: str, run_dir: Path, run_name: str) -> Report:
    if name not in LOGGERS:
        raise UserError(f"trainer.loggers names {name}, which is not one of {', '.join(LOGGERS)}")
    if not any(importlib.util.find_spec(module) for module in LOGGERS[name]):
        raise UserError(f"trainer.loggers=[{name}] needs the package {name}: pip install -e '.[{name}]'")
    from lightning.pytorch import loggers

    logger: Any
    if name == "tensorboard":
        logger = loggers.TensorBoardLogger(run_dir, name="", version="tensorboard")
    else:
        logger = loggers.WandbLogger(name=run_name, save_dir=run_dir, project="mtp-selfspec")

    def report(step: int, values: dict[str, float]) -> None:
        if values:
            logger.log_metrics(values, step)
            logger.save()

    return report
