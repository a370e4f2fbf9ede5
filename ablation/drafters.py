"""A drafter as an experiment names it: by name, or with options."""

from typing import Any

from ablation.tools import Compose
from decoding.contest import Build, maker
from mtp import Network, UserError


def drafter_config(wanted: Any, where: str, compose: Compose) -> dict[str, Any]:
    """The config of a drafter that is named, or is {drafter: name, option: value}: with all its options."""
    options = dict(wanted) if isinstance(wanted, dict) else {"drafter": wanted}
    name = options.pop("drafter", None)
    if not isinstance(name, str):
        raise UserError(f"{where}: {wanted!r} is neither a name nor {{drafter: name, option: value}}")
    build = compose("decode", [f"drafter={name}"], where)["drafter"]
    known = [key for key in build if key != "_target_"]
    if unknown := [key for key in options if key not in known]:
        raise UserError(f"{where}: {name} has no option {unknown[0]}; it has {', '.join(known) or 'none'}")
    return build | options


def drafter_name(build: dict[str, Any]) -> str:
    return build["_target_"].split(".")[-2]


def drafter_options(build: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in build.items() if key != "_target_"}


def drafter_maker(network: Network, build: dict[str, Any]) -> Build:
    """What builds this drafter anew for every run."""
    return maker(network, drafter_name(build), drafter_options(build))


def label(wanted: str | dict[str, Any]) -> str:
    """A name, and behind it the options; of a network folder its last part.

    >>> label("ngram"), label({"drafter": "early_exit", "exit_layer": 3})
    ('ngram', 'early_exit exit_layer=3')
    """
    if isinstance(wanted, str):
        return wanted
    options = (f"{key}={value}" for key, value in wanted.items() if key not in ("drafter", "model"))
    return " ".join([wanted["drafter"], *options])
