"""Two processes train what one trains on the same rows, layer dropout included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training import processes

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from tiny import tiny_network
from training.losses import HeadLoss, Objective
from training.module import Optimization, Training

class Shares:
    # every process sees its own rows of one and the same batch
    def __init__(self, batch, trainer): self.batch, self.trainer = batch, trainer
    def __iter__(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        size = len(self.batch["tokens"]) // ranks
        while True:
            yield {key: value[rank * size : (rank + 1) * size] for key, value in self.batch.items()}

frozen, path, devices = sys.argv[1] == "frozen", sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))
documents = torch.zeros_like(tokens)
documents[0, 3:] = -1
network = tiny_network()
losses = {"sequential": HeadLoss(total=0.3, kind="tv_chain"), "parallel": HeadLoss(each=1.0, decay=0.0)}
if not frozen:
    losses["early_exit"] = None
objective = Objective(e_scale=0.2, curriculum="rotational", rotation=2, p_max=0.0 if frozen else 0.5,
                      dropout_schedule="constant")
optimization = Optimization(lr=1e-3, warmup_steps=0, lr_floor=1.0, max_steps=5, weight_decay=0.0,
                            betas=(0.9, 0.95), clip=1.0, micro_rows=1)
module = Training(network, losses, objective, optimization, frozen=frozen, log_every=2)
trainer = Trainer(accelerator="cpu", devices=devices, strategy=DDPStrategy() if devices > 1 else "auto",
                  max_steps=5, max_epochs=-1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, Shares({"tokens": tokens, "documents": documents}, trainer))
torch.save((network.state_dict(), module.latest), f"{path}/{devices}-{trainer.global_rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["frozen", "free"])
def test_two_processes_train_the_weights_that_one_does(tmp_path, frozen):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    for devices in (1, 2):
        done = subprocess.run(
            [sys.executable, str(script), frozen, str(tmp_path), str(devices)],
            env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for name, value in one[0].items():
        assert torch.equal(first[0][name], second[0][name]), name
        torch.testing.assert_close(first[0][name], value, rtol=1e-4, atol=1e-5)
    for name in ("train/parallel/depth1/loss", "train/gradient_norm", "train/sequential/depth2/alpha"):
        assert first[1][name] == pytest.approx(one[1][name], rel=1e-3), name


def test_gradients_that_only_some_processes_have_are_added_up(monkeypatch):
    """The sum over three processes, of which this one is the first; the others have fixed gradients."""
    monkeypatch.setattr(processes, "AT_ONCE", 5)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (2,), (1,))]
    parameters.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    parameters[0].grad, parameters[4].grad = torch.ones(2, 2), torch.ones(2, dtype=torch.bfloat16)
    asked = []

    def total(values: torch.Tensor) -> torch.Tensor:
        asked.append(len(values))
        if len(asked) == 1:  # who has a gradient: the third nobody
            return values + torch.tensor([1.0, 2.0, 0.0, 1.0, 2.0])
        return values + 10

    processes.add_up(parameters, total)
    assert asked == [5, 4, 4, 2]
    assert parameters[0].grad.tolist() == [[11, 11], [11, 11]]
    assert parameters[1].grad.tolist() == [10, 10, 10]
    assert parameters[2].grad is None
    assert parameters[3].grad.tolist() == [10]
    assert parameters[4].grad.tolist() == [11, 11]
