"""A whole ablation in seconds: tiny networks, a few files, every setting."""

from pathlib import Path

import pytest
from tiny import TINY

import ablate

SIZES = [one for one in TINY if one.startswith("trunk.config")]
RUN = [one for one in TINY if not one.startswith(("trunk.config", "head", "objective", "data=files"))]


def write_files(folder: Path) -> None:
    for number in range(40):
        words = (f"w{number}x{place * place % (50 + number)}" for place in range(60))
        (folder / f"{number:02}.txt").write_text("\n".join(words) + "\n")


def experiment(folder: Path, *overrides: str) -> dict:
    """The config of an ablation of this folder's files, with one seed and every kind of setting."""
    files = ["data=files", f"data.source.path={folder}/*.txt", f"data.cache_dir={folder}/cache"]
    files += ["data.validation_fraction=0.2", "data.held_out_fraction=0.2"]
    config = ablate.compose("ablate", ["~experiment", *files, f"out={folder}/out"], "test")
    sizes = {
        "prompts": 3, "validation_prompts": 2, "prompt_tokens": 4, "max_new_tokens": 8, "longest": 3,
        "num_draft_tokens": 2, "repeats": 1, "loss_texts": 2, "loss_tokens": 12, "compile": False,
        "packed": False, "threads": 1,
    }  # fmt: skip
    families = {
        "parallel": {
            "train": ["head=[parallel]", "heads.parallel.depth=2"], "drafters": ["parallel"],
            "search": [["trainer.lr=1e-3"], ["trainer.lr=3e-3"]],
        },
        "sequential": {
            "train": ["head=[sequential]", "heads.sequential.depth=2"], "drafters": ["sequential"],
            "search": [["trainer.lr=1e-3"], ["trainer.lr=3e-3"]],
        },
        "early_exit": {"train": ["head=[early_exit]", "objective=layerskip"], "drafters": ["early_exit"]},
    }  # fmt: skip
    shape = ["trunk=scratch_small", *SIZES]
    settings = {
        "equal_parameters": {
            "train": shape, "budgets": ["tokens", "flops"],
            "families": {
                "parallel": ["trunk.config.num_hidden_layers=2"],
                "sequential": ["trunk.config.num_hidden_layers=2"],
                "early_exit": [],
            },
        },
        "frozen_trunk": {
            "trunk": "equal_parameters", "train": ["trunk=pretrained", "save=heads", "data.states=float16"],
            "families": {"parallel": [], "sequential": []},
        },
    }  # fmt: skip
    made = {
        "train": ["data=files", *RUN, *files[1:]], "families": families, "settings": settings,
        "yardsticks": ["ngram"],
        "search": ["trainer.max_steps=3", "trainer.warmup_steps=1"],
    }  # fmt: skip
    return config | sizes | made


@pytest.fixture
def config(tmp_path) -> dict:
    write_files(tmp_path)
    return experiment(tmp_path)
