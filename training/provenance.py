"""Where a network comes from: enough to make it again."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tokenizers", "lightning", "datasets")


def provenance(
    config: dict[str, Any], validation: dict[str, float], argv: list[str] | None = None
) -> dict[str, Any]:
    """Command, composed config, commit, versions, seed and the final validation numbers, as plain data."""
    script, *arguments = sys.argv if argv is None else argv
    return {
        "command": shlex.join(["python", Path(script).name, *arguments]),
        "config": config,
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "seed": config.get("seed"),
        "validation": validation,
    }


def commit() -> str | None:
    """The commit of this checkout ("+changes" where tracked files differ), else MTP_COMMIT, else None."""
    head = git("rev-parse", "HEAD")
    if not head:
        return os.environ.get("MTP_COMMIT")
    return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def git(*arguments: str) -> str | None:
    """What git prints, or None without git, outside a checkout or before the first commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
