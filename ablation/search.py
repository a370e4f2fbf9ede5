"""The same search budget for every family: as many candidates, each trained as long, judged alike.

A candidate is a list of overrides. It is trained with fewer tokens on one seed; its score is the speed that
its expected acceptance on validation prompts would give at the weights it reads, so that a deeper exit pays
for its layers. What is done stands in search.jsonl.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ablation.drafters import drafter_config, drafter_name, drafter_options
from ablation.expected import every_length, speed
from ablation.flops import drafting
from ablation.plan import Chosen, Planned, Planner
from ablation.prices import parts
from ablation.runs import Run, ensure_trained
from ablation.shape import families_of
from ablation.subject import Subject
from ablation.tools import Tools
from decoding.results import add_result, identity, read_results
from training.progress import say

JUDGED = ("validation_prompts", "prompt_tokens", "max_new_tokens", "num_draft_tokens", "dtype")
ONE = ("greedy", "token")  # what a score is the mean of


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of a family's candidates in one setting."""

    setting: str
    family: str
    overrides: list[str]
    run: Run
    builds: list[dict[str, Any]]
    id: str


def candidates(config: dict[str, Any], tools: Tools) -> list[Candidate]:
    """All of an experiment, composed and checked."""
    found: list[Candidate] = []
    planner = Planner(config | {"out": str(Path(config["out"], "search")), "seeds": None}, tools, {})
    for name, setting in config["settings"].items():
        if setting.get("search"):
            continue  # it takes what another setting's search chose
        trunk = Planner(config, tools, {}).trunk_of(setting)
        for family, own in families_of(config, name, setting).items():
            spec = config["families"][family]
            for number, tried in enumerate(spec.get("search") or []):
                overrides = planner.overrides(name, setting, family, own, trunk)
                overrides += [*tried, *config["search"], f"seed={config['seed']}"]
                where = f"families.{family}.search"
                made = trunk if isinstance(trunk, Run) else None
                folder = planner.out / f"{name}-{family}-{number}"
                run = planner.run(overrides, where, folder, made)
                builds = [drafter_config(one, where, tools.compose) for one in spec["drafters"]]
                depends = {"run": run.content, "drafters": builds, **{key: config[key] for key in JUDGED}}
                found.append(Candidate(name, family, tried, run, builds, identity(depends)))
    return found


def needed(
    all_candidates: Iterable[Candidate], rows: Iterable[Planned], settings: dict[str, Any]
) -> list[Candidate]:
    """Those that some rows depend on: their families', and with equal FLOPs all families' of a setting."""
    searched_in = {name: setting.get("search") or name for name, setting in settings.items()}
    rows = [row for row in rows if row.setting in searched_in]
    families = {(searched_in[row.setting], row.family) for row in rows}
    whole = {searched_in[row.setting] for row in rows if row.budget == "flops"}
    return [one for one in all_candidates if (one.setting, one.family) in families or one.setting in whole]


def search(
    config: dict[str, Any],
    tools: Tools,
    wanted: list[Candidate],
    open_subject: Callable[[str, str | None], Subject],
) -> Chosen:
    """Try what is not yet known; (setting, family) -> the overrides that did best."""
    path = Path(config["out"], "search.jsonl")
    known = read_results(path)
    todo = [one for one in wanted if one.id not in known]
    if wanted:
        say(f"search: {len(wanted)} candidates, {len(wanted) - len(todo)} of them done already in {path}")
    for place, one in enumerate(todo, start=1):
        if one.id in read_results(path):
            continue  # settings that differ in nothing for this family share it
        say(
            f"search [{place}/{len(todo)}] {one.setting}/{one.family} {' '.join(one.overrides) or 'as it is'}"
        )
        ensure_trained(one.run, tools.train)
        row = judged(one, open_subject(one.run.model, one.run.heads), config)
        shutil.rmtree(one.run.folder)  # the number is kept, the network is not
        say(f"  score {row['score']:.3f}")
        add_result(path, row)
    return best(wanted, read_results(path))


def judged(one: Candidate, subject: Subject, config: dict[str, Any]) -> dict[str, Any]:
    found = [drafter_score(subject, build, config["num_draft_tokens"]) for build in one.builds]
    return {
        "id": one.id,
        "setting": one.setting,
        "family": one.family,
        "overrides": one.overrides,
        "steps": one.run.config["trainer"]["max_steps"],
        "seed": one.run.config["seed"],
        "tau": {mode: fmean(taus[mode] for taus, _ in found) for mode in ONE},
        "score": fmean(score for _, score in found),
    }


def drafter_score(subject: Subject, build: dict[str, Any], length: int) -> tuple[dict[str, float], float]:
    """τ on validation prompts at temperature 0 and 1, and the mean of the speeds that it would give."""
    name, network = drafter_name(build), subject.network
    network.unpack()  # its weights can be counted then
    prices = parts(network, name, drafting(network, name, drafter_options(build), None)).prices(length)
    told = every_length(subject, build, "validation", length, length)
    assert told is not None
    entries = {mode: told[mode][-1] for mode in ONE}
    taus = {mode: entry["tau"] for mode, entry in entries.items()}
    return taus, fmean(speed(entry, prices) for entry in entries.values())


def best(wanted: Iterable[Candidate], known: dict[str, Any]) -> Chosen:
    """The best candidate of every setting and family, as far as known; of equals the first."""
    chosen: Chosen = {}
    scores: dict[tuple[str, str], float] = {}
    for one in wanted:
        if one.id not in known:
            continue
        key, score = (one.setting, one.family), known[one.id]["score"]
        if score > scores.get(key, float("-inf")):
            chosen[key], scores[key] = one.overrides, score
    return chosen
