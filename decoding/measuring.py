"""What a benchmark measures, step by step; what is done is kept, so that a run that was stopped goes on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from decoding.beginning import catching_up, prompt_seconds, with_beginning
from decoding.contest import Build, Contender, Ours, race, warm_up
from decoding.draft import Autoregressive
from decoding.machine import busy
from decoding.replay import Text
from decoding.results import Row, add_result, identity, read_results
from decoding.roofline import peak_bytes, roofline
from decoding.sampling import Sampling
from decoding.standings import OVERALL, PLAIN, UNPREDICTABLE, ratio, result, standings
from decoding.syncs import waits
from decoding.theory import LONGEST, WIDTHS, Promise, prices, promise, scoring
from mtp import Network

WATCHED = 32  # tokens decoded under the profiler, which is slow
PRICED_AT = 4  # drafted tokens at which a drafter of automatic length is timed


@dataclass(frozen=True, slots=True)
class Drafting:
    """One of our contenders: what builds its drafter, how far it drafts, who verifies."""

    name: str
    build: Build
    num_draft_tokens: int | str
    verifier: str

    @property
    def lengths(self) -> list[int]:
        """Draft lengths of which theory takes the best."""
        return [*range(LONGEST + 1)] if isinstance(self.num_draft_tokens, str) else [self.num_draft_tokens]

    @property
    def options(self) -> dict[str, Any]:
        return {"num_draft_tokens": self.num_draft_tokens, "verifier": self.verifier}


@dataclass(frozen=True, slots=True)
class Bench:
    """Who decodes what, and how often; everything checked."""

    network: Network
    drafters: list[Drafting]
    peers: dict[str, Callable[[], Contender]]  # by name, what loads them
    prompts: list[tuple[str, list[int]]]  # category and token ids
    max_new_tokens: int
    repeats: int
    threads: int
    theory: int  # prompts of every category
    syncs: bool
    eos_token_ids: tuple[int, ...]
    depends: dict[str, Any]  # all else that the numbers depend on

    @property
    def names(self) -> list[str]:
        return [PLAIN, *(one.name for one in self.drafters), *self.peers]

    @property
    def first(self) -> Text:
        """The first prompt, after which costs are measured."""
        return Text(self.prompts[0][1], [], Sampling(), self.max_new_tokens)

    def id(self, kind: str, *about: Any) -> str:
        return identity({"kind": kind, "about": about, "names": self.names, "depends": self.depends})


class Store:
    """What is done, by id, and in a file if there is one."""

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: dict[str, Row] = read_results(path) if path else {}

    def once(self, id: str, measure: Callable[[], dict[str, Any]]) -> Row:
        """The row of this id; measured unless it is there."""
        if id not in self.rows:
            self.rows[id] = {"id": id, **measure()}
            if self.path:
                add_result(self.path, self.rows[id])
        return self.rows[id]


def measure(
    bench: Bench, store: Store, say: Callable[[str], None], shown: Callable[[Sequence[Any]], Iterable[Any]]
) -> dict[str, Any]:
    """Costs first, while our network is alone in memory; then all prompts, then what theory promises.

    say is told what happens, shown goes through a list and shows how far it is. Plain data comes back.
    """
    costs = store.once(bench.id("costs"), lambda: measure_costs(bench, say))
    rows = race_all(bench, store, say, shown)
    promises = {}
    for one in bench.drafters:
        key = bench.id("whole promise", one.name, bench.theory, costs["drafting"].get(one.name))
        found = store.once(key, partial(promised, bench, one, rows, costs, say))
        if found["promise"] is not None:
            promises[one.name] = found["promise"]
    return assembled(bench, rows, costs, promises)


def measure_costs(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """What parts cost after the first prompt, what memory allows, and how much of it is held."""
    say("costs of scoring and drafting")
    network, text = bench.network, bench.first
    scored = scoring(network, text)
    drafting = {}
    for one in bench.drafters:
        length = one.num_draft_tokens if isinstance(one.num_draft_tokens, int) else PRICED_AT
        if length:
            drafting[one.name] = prices(network, text, one.build, scored, length, max(one.lengths))
    return {
        "plain_step_seconds": scored(0),
        "scoring": {str(width): scored(width - 1) / scored(0) for width in WIDTHS},
        "drafting": drafting,
        "syncs": measure_syncs(bench) if bench.syncs else {},
        "peak": peak_bytes(network.trunk.device),  # before the large array that measures the bandwidth
        "roofline": roofline(network),
    }


def measure_syncs(bench: Bench) -> dict[str, Any]:
    plain = Drafting(PLAIN, Autoregressive, 0, "token")
    ids, size = bench.first.prompt_ids, min(WATCHED, bench.max_new_tokens)
    return {
        one.name: waits(bench.network, one.build, ids, size, **one.options)
        for one in (plain, *bench.drafters)
    }


def race_all(
    bench: Bench, store: Store, say: Callable[[str], None], shown: Callable[[Sequence[Any]], Iterable[Any]]
) -> list[Row]:
    """A row for every prompt, in order. Contenders are made, and warmed up, only if any is still to come."""
    keys = [bench.id("prompt", *prompt) for prompt in bench.prompts]
    todo = [place for place, key in enumerate(keys) if key not in store.rows]
    say(f"{len(keys)} prompts, {len(keys) - len(todo)} of them done already")
    racers = contenders(bench, say) if todo else []
    for place in shown(todo):
        category, ids = bench.prompts[place]
        if place == todo[0]:
            say("warming up")
            warm_up(racers, ids)
        store.once(keys[place], partial(race_one, bench, racers, category, ids))
    return [store.rows[key] for key in keys]


def contenders(bench: Bench, say: Callable[[str], None]) -> list[Contender]:
    racers: list[Contender] = [Ours(PLAIN, bench.network, Autoregressive)]
    racers += [Ours(one.name, bench.network, one.build, **one.options) for one in bench.drafters]
    for name, load in bench.peers.items():
        say(f"loading {name}")
        racers.append(load())
    return racers


def race_one(bench: Bench, racers: list[Contender], category: str, ids: list[int]) -> dict[str, Any]:
    runs = race(racers, ids, bench.max_new_tokens, bench.repeats)
    return {
        "category": category,
        "prompt_ids": ids,
        "token_ids": runs[PLAIN][0].token_ids,
        "contenders": {name: result(found, runs[PLAIN]) for name, found in runs.items()},
        "peak": peak_bytes(bench.network.trunk.device),
        "warning": busy(bench.threads),
    }


def promised(
    bench: Bench, one: Drafting, rows: list[Row], costs: Row, say: Callable[[str], None]
) -> dict[str, Any]:
    """What theory promises on some prompts of every category, and the share of it measured on them."""
    chosen = first_of_each([row for row in rows if row["category"] != UNPREDICTABLE], bench.theory)
    if not chosen or one.name not in costs["drafting"]:
        return {"promise": None}
    say(f"what theory promises of {one.name}")
    texts = [Text(row["prompt_ids"], row["token_ids"], Sampling(), bench.max_new_tokens) for row in chosen]
    found = promise(
        bench.network, texts, one.build, costs["drafting"][one.name]["prices"],
        lengths=one.lengths, eos_token_ids=bench.eos_token_ids,
    )  # fmt: skip
    if found is None:
        return {"promise": None}
    whole = whole_speedup(bench, one, chosen, costs, found)
    reached = ratio(chosen, one.name, PLAIN)["value"]
    share = {"whole": whole, "reached": reached, "share": reached / whole}
    return {"promise": asdict(found) | {"prompts": len(chosen)} | share}


def whole_speedup(bench: Bench, one: Drafting, rows: list[Row], costs: Row, found: Promise) -> float:
    """The promise for whole runs, in which prompts are read too."""
    step, drafted = costs["plain_step_seconds"], found.num_draft_tokens
    draft = costs["drafting"][one.name]["c"] * step * drafted
    plain, promised = 0.0, 0.0
    for row in rows:
        ids, seconds = row["prompt_ids"], median(row["contenders"][PLAIN]["seconds"])
        prompt = min(seconds, prompt_seconds(bench.network, ids, step))
        own = catching_up(bench.network, ids, one.build, drafted, draft) if drafted else 0.0
        plain += seconds
        promised += with_beginning(seconds, prompt, own, found.speedup)
    return plain / promised


def first_of_each(rows: list[Row], count: int) -> list[Row]:
    """The first `count` rows of every category."""
    seen: dict[str, int] = {}
    found = []
    for row in rows:
        seen[row["category"]] = seen.get(row["category"], 0) + 1
        if seen[row["category"]] <= count:
            found.append(row)
    return found


def assembled(
    bench: Bench, rows: list[Row], costs: Row, promises: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """All that was found, as plain data."""
    table = standings(rows, bench.names)
    roof = costs["roofline"] | {
        "share": table[OVERALL][PLAIN]["tokens_per_second"] / costs["roofline"]["tokens_per_second"]
    }
    peaks = [row["peak"] for row in rows]
    every = {key: max((peak[key] or 0 for peak in peaks), default=0) or None for key in costs["peak"]}
    return {
        "standings": table,
        "promises": promises,
        "costs": {key: costs[key] for key in ("plain_step_seconds", "scoring", "drafting")},
        "roofline": roof,
        "memory": {"ours": costs["peak"], "all": every},
        "syncs": costs["syncs"],
        "warning": next((row["warning"] for row in rows if row["warning"]), None),
        "prompts": [{key: row[key] for key in row if key not in ("id", "peak", "warning")} for row in rows],
    }
