"""The project files agree with one another."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_every_direct_dependency_is_pinned_inside_its_bounds(requirement):
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_no_pin_names_a_local_build():
    assert not [name for name, version in pins().items() if "+" in version]


def test_every_package_folder_is_a_package():
    places = (ROOT / "mtp", ROOT / "decoding", ROOT / "training", ROOT / "ablation")
    folders = {path.parent for place in places for path in place.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_make_help_describes_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(phony[1].split()) == set(re.findall(r"^([a-z]+):.*## \S", makefile, re.MULTILINE))
