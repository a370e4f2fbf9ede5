import json
from pathlib import Path

import hydra
import pytest
from test_train import run
from tiny import TINY

import entry
import objectives
from decoding.results import read_results
from mtp import UserError
from objectives import table

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def config(tmp_path) -> dict:
    """Two objectives on a tiny frozen trunk."""
    for number in range(40):
        words = (f"w{number}x{place * place % (50 + number)}" for place in range(60))
        (tmp_path / f"{number:02}.txt").write_text("\n".join(words) + "\n")
    files = [f"data.source.path={tmp_path}/*.txt", f"data.cache_dir={tmp_path}/cache"]
    held_out = ["data.validation_fraction=0.1", "data.held_out_fraction=0.1"]
    run([*TINY, *files, *held_out], tmp_path / "first")
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        made = entry.plain(hydra.compose("objectives", ["data=files", *files, *held_out]))
    unsized = [one for one in TINY if not one.startswith(("trunk.config", "head", "objective"))]
    own = ["trunk=pretrained", f"trunk.path={tmp_path}/first/network", *unsized, *files, *held_out]
    families = {"parallel": ["head=[parallel]", "heads.parallel.depth=2"]}
    sizes = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 8, "num_draft_tokens": 2}
    return made | sizes | {
        "train": own, "families": families, "kinds": ["ce", "tv"], "seeds": [0], "out": f"{tmp_path}/out",
    }  # fmt: skip


def test_every_run_is_a_line_and_what_is_done_is_kept(config, tmp_path, capsys):
    objectives.objectives(config | {"kinds": ["ce"]})
    objectives.objectives(config)
    told = capsys.readouterr().err
    assert "2 runs, 1 of them done already" in told
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["family"], row["kind"], row["seed"]) for row in rows] == [
        ("parallel", "ce", 0),
        ("parallel", "tv", 0),
    ]
    assert all(1 <= row[key] <= 3 for row in rows for key in ("tau_0", "tau_1"))
    assert (tmp_path / "out" / "table.md").read_text() == table(rows)


def test_the_table_has_mean_and_spread_over_seeds():
    rows = [{"family": "parallel", "kind": "tv", "tau_0": 2.0 + seed, "tau_1": 1.5} for seed in (0, 1)]
    assert table(rows).splitlines()[-1] == "| parallel | tv | 2 | 2.500 ± 0.707 | 1.500 ± 0.000 |"


def test_an_unknown_objective_is_refused_before_anything_is_trained(config):
    with pytest.raises(UserError, match="kinds names best, which is not one of ce, kl"):
        objectives.objectives(config | {"kinds": ["best"]})


@pytest.mark.parametrize(
    ("families", "line"),
    [
        ({"mine": ["head=[parallel]"]}, "families.mine trains parallel: the name has to be that"),
        ({"eagle": ["head=[eagle]"]}, "families.eagle: no expected τ can be told of this head"),
    ],
)
def test_a_family_that_cannot_be_measured_is_refused_before_anything_is_trained(config, families, line):
    with pytest.raises(UserError, match=line):
        objectives.objectives(config | {"families": families})


def test_the_table_in_the_docs_is_that_of_the_results():
    folder = ROOT / "docs/objectives"
    done = list(read_results(folder / "results.jsonl").values())
    assert (folder / "table.md").read_text(encoding="utf-8") == table(done)
    page = (folder / "README.md").read_text(encoding="utf-8")
    for row in table(done).splitlines()[2:]:
        assert row in page
