"""Pages in docs/ say what is so: their tables come from results, their commands work, their example runs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

import entry
from ablation.page_numbers import BLOCK, pages, written
from decoding.benchmark_page import chapters, markdown

ROOT = Path(__file__).resolve().parents[1]
DOCS = [path for path in pages(ROOT) if path.name != "README.md" or path.parent.name == "docs"]
DRAFTERS = {path.stem for path in (ROOT / "conf/drafter").glob("*.yaml")}
MEASURED = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])")  # a number with a fraction
COMPOSED = ("train", "decode", "ablate", "benchmark", "objectives")
RUN_IN_ORDER = """
import runpy, shlex, sys
for line in sys.argv[1:]:
    _, program, *arguments = shlex.split(line)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
"""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(text: str, opening: str) -> list[str]:
    return re.findall(rf"^```{opening}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[str]:
    """Every command line of ours in a page's code blocks, without its comment."""
    lines = [
        line
        for block in blocks_of(path.read_text(encoding="utf-8"), r"[^\n]*")
        for line in block.splitlines()
    ]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("python ")]


def composed(command: str) -> bool:
    """Whether Hydra composes it; not so placeholders, and the page's own example, which is run."""
    program = shlex.split(command)[1]
    return Path(program).stem in COMPOSED and "…" not in command and "bigram" not in command


COMMANDS = sorted({command for path in pages(ROOT) for command in commands(path) if composed(command)})


@pytest.mark.parametrize("path", pages(ROOT), ids=name)
def test_the_tables_of_numbers_are_those_of_the_results(path):
    text = path.read_text(encoding="utf-8")
    assert written(text) == text, "python -m ablation.page_numbers writes them anew"


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_no_other_table_has_measured_numbers(path):
    """So every number with a fraction in a table comes from a results.jsonl."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert [line for line in tables if MEASURED.search(line)] == []


def test_the_page_of_benchmarks_is_what_their_files_say():
    page = chapters((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    assert not MEASURED.search(page.pop(""))  # an introduction, in words
    said: dict[str, str] = {}
    for file in (ROOT / "docs/benchmarks").glob("*.json"):
        said |= chapters(markdown(json.loads(file.read_text(encoding="utf-8"))))
    said.pop("")
    assert page == said


def test_a_number_that_is_changed_by_hand_is_found():
    text = (ROOT / "docs/methods/sequential.md").read_text(encoding="utf-8")
    first = BLOCK.search(text)[0]
    number = MEASURED.search(first)[0]
    assert written(text.replace(number, "9.99")) == text


def test_every_drafter_has_a_page_with_its_numbers():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/methods").glob("*.md"))
    told = {mark["drafter"] for mark in BLOCK.finditer(text)}
    assert told == DRAFTERS - {"none"}


@pytest.mark.parametrize("path", pages(ROOT), ids=name)
def test_links_within_the_project_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_composes(command):
    """Its keys and groups exist; what it does is tested elsewhere."""
    _, program, *arguments = shlex.split(command)
    overrides = [argument for argument in arguments if not argument.startswith(("prompt=", "-"))]
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        hydra.compose(Path(program).stem, overrides)


def test_the_example_drafter_is_built_as_the_page_says(tmp_path):
    page = (ROOT / "docs/add-a-drafter.md").read_text(encoding="utf-8")
    for folder in ("mtp", "decoding", "training", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for program in ROOT.glob("*.py"):
        shutil.copy(program, tmp_path)
    (tmp_path / "networks").symlink_to(ROOT / "networks")
    files = re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(files) == 4
    for file, text in files:
        assert not (tmp_path / file).exists()
        (tmp_path / file).write_text(text, encoding="utf-8")
    lines = "".join(blocks_of(page, "sh run")).splitlines()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", RUN_IN_ORDER, *lines],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "bigram.json").read_text(encoding="utf-8"))
    assert found["identical"] is True
    assert found["results"][0]["drafted"] > 0
