"""Which runs and rows an experiment asks for: settings × families × seeds × budgets × drafters.

All is composed before anything is trained, so a mistake in the last row is told first.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ablation.budget import equal_flops
from ablation.drafters import drafter_config, drafter_name, label
from ablation.flops import training_flops
from ablation.runs import Run, check_held_out, held_out
from ablation.shape import check_network, families_of, stored
from ablation.tools import Tools
from decoding.results import identity
from mtp import UserError

GIVEN = "given"  # the setting of networks that stand in `networks`
PLAIN = "plain"  # a trunk that is trained without heads
# What a row's numbers depend on, times apart.
SETTINGS = (
    "prompts", "validation_prompts", "prompt_tokens", "max_new_tokens", "num_draft_tokens", "verifier",
    "temperature", "longest", "seed", "dtype",
)  # fmt: skip
TIMING = ("repeats", "threads", "device", "packed", "compile")  # what its times depend on besides
Chosen = dict[tuple[str, str], list[str]]  # (setting, family) -> overrides that its search chose


@dataclass(frozen=True)
class Planned:
    """A row to be: one drafter on one network."""

    setting: str
    network: str
    drafter: str
    seed: int
    budget: str
    build: dict[str, Any]  # the drafter's own config, with _target_
    run: Run | None  # what trains the network; None where it is there
    alone: Run | None  # what trains its trunk without heads
    model: str  # the folder of its trunk
    heads: str | None  # another one, of its heads
    config: dict[str, Any]  # all that the row's numbers depend on
    several_seeds: bool
    family: str | None = None

    @property
    def name(self) -> str:
        parts = [] if self.setting == GIVEN else [self.setting]
        parts += [self.network, self.drafter]
        parts += [self.budget] if self.budget != "tokens" else []
        return "/".join([*parts, f"seed{self.seed}"] if self.several_seeds else parts)

    @cached_property
    def content(self) -> str:
        """The same for rows that measure the same thing under another heading."""
        return identity(self.config)

    @cached_property
    def id(self) -> str:
        return identity({"content": self.content, "heading": [self.setting, self.network, self.budget]})


@dataclass(frozen=True, slots=True)
class Trained:
    """A network to be trained, and under which heading."""

    setting: str
    network: str
    family: str | None
    seed: int
    budget: str
    run: Run
    alone: Run | None
    drafters: list[Any]


def plan(config: dict[str, Any], tools: Tools, chosen: Chosen | None = None) -> list[Planned]:
    """All rows, composed and checked before the first is worked on."""
    planner = Planner(config, tools, chosen or {})
    rows = [*planner.given(), *planner.settings()]
    names = [row.name for row in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"networks: {twice[0]} is there twice")
    return rows


def selected(rows: list[Planned], only: list[str] | None) -> list[Planned]:
    """The rows that `only` names; a name may be a pattern such as frozen_trunk/*."""
    names = [row.name for row in rows]
    for wanted in only or []:
        if not fnmatch.filter(names, escaped(wanted)):
            raise UserError(f"only={wanted} is not one of {', '.join(names)}")
    return [
        row
        for row in rows
        if only is None or any(fnmatch.fnmatchcase(row.name, escaped(wanted)) for wanted in only)
    ]


def escaped(pattern: str) -> str:
    """Only * and ? are special: a drafter's options may have brackets."""
    return pattern.replace("[", "[[]")


class Planner:
    """Composes an experiment's runs; equal ones are made once, whatever they are called."""

    def __init__(self, config: dict[str, Any], tools: Tools, chosen: Chosen):
        self.config, self.tools, self.chosen = config, tools, chosen
        self.out = Path(config["out"])
        self.seeds: list[int] = config["seeds"] or [config["seed"]]
        self.runs: dict[str, Run] = {}  # by content

    def given(self) -> Iterator[Planned]:
        """Rows of `networks`: those that are there, and those with a training of their own."""
        for name, network in self.config["networks"].items():
            check_network(name, network)
            if "train" not in network:
                yield from self.rows_of_folder(GIVEN, name, network["model"], network["drafters"])
                continue
            where = f"networks.{name}.train"
            for seed in self.seeds:
                overrides = [*self.config["train"], *network["train"], f"seed={seed}"]
                run = self.run(overrides, where, self.folder(name, seed))
                trained = Trained(GIVEN, name, None, seed, "tokens", run, None, network["drafters"])
                yield from self.rows_of_run(trained, f"networks.{name}.drafters")

    def settings(self) -> Iterator[Planned]:
        for name, setting in self.config["settings"].items():
            trunk = self.trunk_of(setting)
            if isinstance(trunk, str):
                yield from self.rows_of_folder(name, PLAIN, trunk, [NONE, *self.config["yardsticks"]])
            for trained in self.trained(name, setting, trunk):
                yield from self.rows_of_run(trained, f"settings.{name}")

    def trunk_of(self, setting: dict[str, Any]) -> Run | str | None:
        """The one trunk that a setting's heads are grafted on: a folder, or another setting's reference."""
        trunk = setting.get("trunk")
        if trunk is None or trunk not in self.config["settings"]:
            return trunk
        other = self.config["settings"][trunk]
        seed = self.seeds[0]
        overrides = [*self.config["train"], *other.get("train", []), "head=[]", f"seed={seed}"]
        layers = self.run(overrides, f"settings.{trunk}.train", self.out / "unused")
        return self.reference(layers)

    def trained(self, name: str, setting: dict[str, Any], trunk: Run | str | None) -> Iterator[Trained]:
        """A setting's networks: by seed the references first, then every family with every budget."""
        families = families_of(self.config, name, setting)
        for seed in self.seeds:
            runs = {
                family: self.family_run(name, setting, family, own, seed, trunk)
                for family, own in families.items()
            }
            alone = {family: None if trunk else self.reference(run) for family, run in runs.items()}
            for reference in {run.model: run for run in alone.values() if run}.values():
                drafters = [NONE, *self.config["yardsticks"]]
                plain = f"{PLAIN}_{layers_of(reference)}"
                yield Trained(name, plain, None, seed, "tokens", reference, reference, drafters)
            for budget in setting.get("budgets") or self.config["budgets"]:
                steps = self.steps(runs) if budget == "flops" else {}
                for family, run in runs.items():
                    drafters = [*self.config["families"][family]["drafters"]]
                    drafters += [] if trunk else self.config["yardsticks"]
                    if family in steps:
                        own = [*families[family], f"trainer.max_steps={steps[family]}"]
                        run = self.family_run(name, setting, family, own, seed, trunk, budget)
                    yield Trained(name, family, family, seed, budget, run, alone[family], drafters)

    def family_run(
        self, name: str, setting: dict[str, Any], family: str, own: Sequence[str], seed: int,
        trunk: Run | str | None, budget: str = "tokens",
    ) -> Run:  # fmt: skip
        overrides = self.overrides(name, setting, family, own, trunk)
        searched_in = setting.get("search") or name
        overrides += [*self.chosen.get((searched_in, family), []), f"seed={seed}"]
        where = f"settings.{name}.families.{family}"
        made = trunk if isinstance(trunk, Run) else None
        folder = f"{name}-{family}" + ("" if budget == "tokens" else f"-{budget}")
        return self.run(overrides, where, self.folder(folder, seed), made)

    def overrides(
        self, name: str, setting: dict[str, Any], family: str, own: Sequence[str], trunk: Run | str | None
    ) -> list[str]:
        """Of a family's runs in a setting, from the most general to the most special."""
        found = [*self.config["train"], *setting.get("train", [])]
        found += [*self.config["families"][family]["train"], *own]
        path = trunk.config["out"] if isinstance(trunk, Run) else trunk
        return found + ([f"trunk.path={path}"] if path else [])

    def run(self, overrides: list[str], where: str, folder: Path, trunk: Run | None = None) -> Run:
        training = self.tools.compose("train", overrides, where)
        check_held_out(training["data"], self.config["data"], where)
        return self.known(training | {"resume": False}, folder, trunk)

    def known(self, training: dict[str, Any], folder: Path, trunk: Run | None = None) -> Run:
        """The run of this config, in this folder unless the same was wanted before."""
        run = Run(training | {"out": str(folder / "network"), "run_dir": str(folder)}, trunk)
        return self.runs.setdefault(identity(run.content), run)

    def reference(self, run: Run) -> Run:
        """The run that trains the same trunk on the same tokens without heads."""
        objective = self.tools.compose("train", ["head=[]"], "train")["objective"]
        training = run.config | {"heads": {}, "objective": objective}
        name = f"{PLAIN}-{layers_of(run)}"
        key = identity(Run(training).content)[:6]  # trunks may differ in more than their layers
        return self.known(training, self.folder(f"{name}-{key}", training["seed"]))

    def steps(self, runs: dict[str, Run]) -> dict[str, int]:
        """Steps of every family for equal FLOPs."""
        flops = {}
        for family, run in runs.items():
            skeleton = self.tools.skeleton(run.trunk_config, run.config["heads"])
            flops[family] = training_flops(skeleton, run.config)
        return equal_flops(max(run.config["trainer"]["max_steps"] for run in runs.values()), flops)

    def folder(self, name: str, seed: int) -> Path:
        return self.out / (f"{name}-{seed}" if len(self.seeds) > 1 else name)

    def rows_of_run(self, trained: Trained, where: str) -> Iterator[Planned]:
        run = trained.run
        for wanted in trained.drafters:
            build = drafter_config(wanted, where, self.tools.compose)
            yield Planned(
                trained.setting, trained.network, label(wanted), trained.seed, trained.budget, build, run,
                trained.alone, run.model, run.heads, self.depends(run.content, build),
                len(self.seeds) > 1, trained.family,
            )  # fmt: skip

    def rows_of_folder(
        self, setting: str, name: str, model: str, drafters: Sequence[Any]
    ) -> Iterator[Planned]:
        for wanted in drafters:
            where = f"networks.{name}.drafters" if setting == GIVEN else "yardsticks"
            build = drafter_config(wanted, where, self.tools.compose)
            made = stored(model, drafter_name(build))
            yield Planned(
                setting, name, label(wanted), self.config["seed"], "tokens", build, None, None, model, None,
                self.depends(made, build), False,
            )  # fmt: skip

    def depends(self, network: dict[str, Any], build: dict[str, Any]) -> dict[str, Any]:
        found = {key: self.config[key] for key in SETTINGS}
        return found | {"network": network, "drafter": build, "data": held_out(self.config["data"])}


NONE = "none"


def layers_of(run: Run) -> int:
    return run.config["trunk"]["config"]["num_hidden_layers"]
