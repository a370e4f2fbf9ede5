"""How an entry point runs: Hydra composes, the function gets plain data, a mistake is told in one line."""

import os

os.environ["HYDRA_FULL_ERROR"] = (
    "1"  # before Hydra is imported: its exceptions come here instead of ending the process
)

import difflib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
from antlr4.error.Errors import RecognitionException
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mtp.errors import UserError

CONF = Path(__file__).resolve().parent / "conf"
# The current folder stays the current folder, and Hydra leaves no folders and log files of its own.
PLAIN = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.sweep.dir=.",
    "hydra.sweep.subdir=.",
)
SWEEP_FILE = Path("multirun.yaml")  # a multirun leaves it in the sweep folder, and cannot be told not to


def run(function: Callable[[dict[str, Any]], None], config_name: str, argv: list[str] | None = None) -> None:
    """Compose conf/<config_name>.yaml with the command line and call `function` with it as a plain dict.

    `argv` defaults to the process's own; `--help`, `--cfg job` and `--multirun` are Hydra's. Ends with status
    2 and one line on standard error after a UserError or an error of Hydra's or OmegaConf's.
    """
    arguments = sys.argv[1:] if argv is None else argv
    errors: list[Exception] = []
    here = os.getpid()

    def task(config: DictConfig) -> None:
        sys.argv = [program[0], *arguments]  # what the user said, without our own additions
        try:
            function(plain(config))
        except Exception as error:  # Hydra would print lines of its own on the way
            if os.getpid() != here:  # a launcher's job in another process: nobody would see the list
                raise
            errors.append(error)

    program, sys.argv = sys.argv, [sys.argv[0], *arguments, *PLAIN, f"hydra.job.name={config_name}"]
    foreign = SWEEP_FILE.exists()
    try:
        check_flags(arguments)
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        errors.append(error)
    finally:
        sys.argv = program
        if not foreign:
            SWEEP_FILE.unlink(missing_ok=True)
    if errors:
        fail(told(errors[0], config_name, arguments))


def check_flags(arguments: list[str]) -> None:
    """Refuse a flag that Hydra does not have; its own parser would print its usage and leave."""

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; keys are said as key=value, and --help tells the flags")

    parser = get_args_parser()
    parser.error = refuse
    parser.parse_args(arguments)


def plain(config: DictConfig) -> dict[str, Any]:
    """The config in dicts and lists, interpolations resolved; a value that is missing is an error."""
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def fail(line: str) -> NoReturn:
    print(" ".join(line.split()), file=sys.stderr)
    sys.exit(2)


def told(error: Exception, config_name: str, arguments: list[str]) -> str:
    """What went wrong: the key, what was found, what is allowed. A fault of ours is raised again."""
    causes = list(chain(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return str(cause)
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        raise error
    if not isinstance(causes[-1], (HydraException, OmegaConfBaseException, RecognitionException, TypeError)):
        raise causes[-1]
    return explained(error, config_name, arguments) or f"{config_name}: {causes[-1]}"


def explained(error: Exception, config_name: str, arguments: list[str]) -> str | None:
    """The commonest of Hydra's and OmegaConf's errors in our words."""
    text = str(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing: say {error.full_key}=…"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: a value with signs needs quotes of its own, key='\"a, b\"'"
    if found := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(found[1], config_name)
    if found := re.search(r"Could not (?:find|load) '([^/']+)/([^']+)'", text):
        names = sorted(path.stem for path in (CONF / found[1]).glob("*.yaml"))
        return f"{found[1]}={found[2]} is not one of {', '.join(names)}"
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what caused it, down to the first cause."""
    while error is not None:
        yield error
        error = error.__cause__


def unknown_key(key: str, config_name: str) -> str:
    """The line for a key that the config does not have, with the nearest that it has."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        known = keys(OmegaConf.to_container(hydra.compose(config_name), resolve=False))
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key {key}: {hint}see --cfg job for the keys that there are"


def keys(config: Any, prefix: str = "") -> list[str]:
    if not isinstance(config, dict):
        return []
    return [
        name for key, value in config.items() for name in (f"{prefix}{key}", *keys(value, f"{prefix}{key}."))
    ]
