"""The import rule: who may know whom, read from the source without running it.

training/ and decoding/ build on mtp/ and never on each other; mtp/ builds on neither; ablation/ builds on all
three and none of them on it; no package knows an entry point. Only the entry points and
training/{data,module,callbacks,trainer}.py know Lightning or Hydra.
Every file is named after a subject, so none is called utils.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "mtp": {"training", "decoding", "ablation"},
    "decoding": {"training", "ablation"},
    "training": {"decoding", "ablation"},
    "ablation": set(),
}
ENTRY_POINTS = {"train", "decode", "ablate", "benchmark", "objectives", "entry"}
FRAMEWORKS = {"lightning", "lightning_fabric", "pytorch_lightning", "hydra", "omegaconf"}
MAY_USE_FRAMEWORKS = {f"training/{name}.py" for name in ("data", "module", "callbacks", "trainer")}
NAMES_WITHOUT_A_SUBJECT = {"utils", "util", "common", "helpers", "helper", "base", "types"}


def violations(root: Path) -> list[str]:
    """Every breach of the rule below `root`, as "file:line imports module"."""
    found = []
    for package, forbidden in FORBIDDEN.items():
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            banned = forbidden | ENTRY_POINTS | (set() if name in MAY_USE_FRAMEWORKS else FRAMEWORKS)
            imports = imported(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root))
            found += [f"{name}:{line} imports {module}" for line, module in imports if top(module) in banned]
    return found


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that the file at `path` imports, by statement or importlib."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, level=0):
                yield node.lineno, module or ""
            case ast.ImportFrom(module=module, names=names, level=level):
                package = path.parts[:-1][: len(path.parts) - level]
                yield from ((node.lineno, ".".join((*package, module or alias.name))) for alias in names)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[target, *_]):
                if name in {"import_module", "__import__"}:
                    yield node.lineno, literal_start(target)


def literal_start(node: ast.expr) -> str:
    """The constant text with which a string or an f-string begins."""
    match node:
        case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
    return ""


def top(module: str) -> str:
    """The top-level package of a dotted name."""
    return module.partition(".")[0]


def names_without_a_subject(root: Path) -> list[str]:
    """Files and folders whose name says nothing about what is inside."""
    paths = [*root.glob("*.py")]
    for place in (*FORBIDDEN, "tests"):
        paths += (root / place).rglob("*")
    named = [path for path in paths if path.suffix == ".py" or path.is_dir()]
    return sorted(path.relative_to(root).as_posix() for path in named if path.stem in NAMES_WITHOUT_A_SUBJECT)


def test_the_packages_keep_the_import_rule():
    assert violations(ROOT) == []


def test_every_file_is_named_after_its_subject():
    assert names_without_a_subject(ROOT) == []


def test_the_rule_is_checked_on_real_files():
    assert all(list((ROOT / package).rglob("*.py")) for package in FORBIDDEN)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("training/losses.py", "import decoding.verify"),
        ("training/losses.py", "from decoding import verify"),
        ("training/losses.py", "import torch, decoding"),
        ("training/losses.py", "from ..decoding import verify"),
        ("training/losses.py", "from .. import decoding"),
        ("training/losses.py", "def late():\n    import decoding"),
        ("training/losses.py", "import lightning as L"),
        ("training/data.py", "from decode import main"),
        ("decoding/generate.py", "from training.losses import alpha"),
        ("decoding/drafters/ngram.py", "from ...training import losses"),
        ("decoding/drafters/ngram.py", "from hydra.utils import instantiate"),
        ("decoding/generate.py", "importlib.import_module('training.losses')"),
        ("decoding/generate.py", "import_module(f'training.{name}')"),
        ("mtp/network.py", "from decoding.cache import KVCache"),
        ("decoding/table.py", "from ablation.rows import computed"),
        ("ablation/runs.py", "from omegaconf import OmegaConf"),
        ("ablation/session.py", "import train"),
        ("mtp/network.py", "if TYPE_CHECKING:\n    from training import losses"),
        ("mtp/network.py", "from omegaconf import OmegaConf"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, line):
    write(tmp_path / file, line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("training/losses.py", "from mtp import Network"),
        ("training/module.py", "import lightning as L\nfrom omegaconf import DictConfig"),
        ("training/data.py", "from lightning.pytorch import LightningDataModule"),
        ("training/losses.py", "from . import schedule\nfrom .schedule import curriculum"),
        ("decoding/generate.py", "importlib.import_module(f'decoding.drafters.{name}')"),
        ("decoding/drafters/ngram.py", "from ..draft import Draft\nfrom decoding.cache import KVCache"),
        ("decode.py", "import hydra, mtp, decoding, training"),
        ("ablation/rows.py", "import mtp, decoding, training"),
    ],
)
def test_an_allowed_import_is_not_found(tmp_path, file, line):
    write(tmp_path / file, line)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "file", ["mtp/utils.py", "decoding/drafters/base.py", "tests/common/test_x.py", "types.py"]
)
def test_a_name_without_a_subject_is_found(tmp_path, file):
    write(tmp_path / file, "")
    assert len(names_without_a_subject(tmp_path)) == 1


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
