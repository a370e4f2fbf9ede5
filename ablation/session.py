"""One call of ablate.py: search, train, measure row by row, and write what is known after each.

Everything that is done stands in files, so the same command goes on where it was stopped.
"""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ablation import rows as row_parts
from ablation.compared import comparisons
from ablation.drafters import drafter_name
from ablation.example import begun, example
from ablation.page import figure, page
from ablation.plan import NONE, Chosen, Planned, plan, selected
from ablation.runs import ensure_trained
from ablation.search import Candidate, best, candidates, needed, search
from ablation.shape import check_families, check_setting
from ablation.subject import Subject, subject
from ablation.text import loss
from ablation.tools import Tools
from decoding.results import Row, add_result, read_results, replace
from decoding.table import table
from mtp import Network, UserError
from training.progress import say
from training.prompts import prompts

Texts = dict[tuple[Any, ...], Any]
KINDS = ("sequential", "parallel", "early_exit")  # what an example should have


class Session:
    """What one call knows: its experiment, what is done, and the network in hand."""

    def __init__(self, config: dict[str, Any], arguments: list[str], tools: Tools):
        check_families(config["families"], config["settings"])
        for name, setting in config["settings"].items():
            check_setting(name, setting, config["settings"])
        self.config, self.tools = config, tools
        self.results = Path(config["out"], "results.jsonl")
        self.opened: tuple[tuple[str, str | None], Subject] | None = None
        self.texts: Texts = {}
        self.losses: dict[str, float] = {}  # by trunk
        kept = [one for one in arguments if not one.startswith(("only=", "again=", "timed="))]
        self.frame = row_parts.Frame(config, kept, self.trunk_loss, self.loss_alone, shown)

    def run(self) -> str:
        """Do what is missing of the rows asked for; the table."""
        config = self.config
        rows = selected(plan(config, self.tools), config["only"])
        tried = candidates(config, self.tools)
        chosen = self.search(tried, rows)
        every = plan(config, self.tools, chosen)
        rows = selected(every, config["only"])
        known = read_results(self.results)
        pending = [row for row in rows if config["again"] or not self.is_done(known.get(row.id))]
        say(f"{len(rows)} rows, {len(rows) - len(pending)} of them done already in {self.results}")
        began = time.monotonic()
        for place, row in enumerate(pending):
            say(f"[{place + 1}/{len(pending)}] {row.name}{left(began, place, len(pending))}")
            add_result(self.results, self.row(row))
            self.write(every)
        if pending or not self.results.with_name("report.html").is_file():
            self.finish(every)
        return self.write(every)

    def search(self, tried: list[Candidate], rows: list[Planned]) -> Chosen:
        search(self.config, self.tools, needed(tried, rows, self.config["settings"]), self.open)
        return best(tried, read_results(Path(self.config["out"], "search.jsonl")))

    def is_done(self, found: Row | None) -> bool:
        if found is None or found.get("schema") != row_parts.SCHEMA:
            return False
        return not self.config["timed"] or row_parts.is_timed(found, self.frame)

    def row(self, row: Planned) -> Row:
        """One row, as far as it is missing; one that was measured under another heading is taken over."""
        known = read_results(self.results)
        found = known.get(row.id)
        twins = [one for one in known.values() if one.get("content") == row.content and self.is_done(one)]
        if twins and not self.config["again"]:
            return twins[0] | row_parts.heading(row)
        if row.run is not None:
            ensure_trained(row.run, self.tools.train)
        network = self.open(row.model, row.heads)
        if found is None or found.get("schema") != row_parts.SCHEMA or self.config["again"]:
            found = row_parts.computed(row, network, self.frame)
        if self.config["timed"]:
            found = row_parts.with_times(found, row, network, self.frame)
        say("  " + row_parts.in_short(found))
        return found

    def open(self, model: str, heads: str | None) -> Subject:
        """The network in hand, or another; only one is held."""
        if self.opened is None or self.opened[0] != (model, heads):
            self.opened = None
            network = self.tools.load(model, heads)

            def cut(split: str) -> list[list[int]]:
                return self.cut(network, split, self.config[COUNTS[split]], self.config["prompt_tokens"])

            self.opened = (
                (model, heads),
                subject(network, model, cut, self.config["max_new_tokens"], self.texts),
            )
        return self.opened[1]

    def cut(self, network: Network, split: str, count: int, size: int) -> list[list[int]]:
        if network.tokenizer is None:
            raise UserError("networks: one has no tokenizer, so no prompts can be cut for it")
        documents = self.tools.documents(self.config["data"], split)
        found = prompts(documents, count, network.tokenizer, size, self.config["seed"])
        return [prompt.token_ids for prompt in found]

    def trunk_loss(self, found: Subject) -> float:
        """On held-out text; the same text for all networks with one tokenizer."""
        if found.key not in self.losses:
            size = min(self.config["loss_tokens"], found.network.trunk.context)
            lines = self.cut(found.network, "held_out", self.config["loss_texts"], size)
            self.losses[found.key] = loss(found.network, lines)
        return self.losses[found.key]

    def loss_alone(self, row: Planned) -> float | None:
        """Of the same trunk trained without heads; of a frozen one its own."""
        if row.alone is not None:
            ensure_trained(row.alone, self.tools.train)
            model = row.alone.config["out"]
        elif row.run is None or not row.heads:
            return None
        else:
            model = row.model
        key = f"alone {model}"
        if key not in self.losses:
            before, self.opened = self.opened, None
            self.losses[key] = self.trunk_loss(self.open(model, None))
            self.opened = before
        return self.losses[key]

    def write(self, every: list[Planned]) -> str:
        """table.md beside the results, with all rows that are done, in the order of the experiment."""
        text = table(self.done(every))
        replace(self.results.with_name("table.md"), text)
        return text

    def done(self, every: list[Planned]) -> list[Row]:
        known = read_results(self.results)
        return [known[row.id] for row in every if row.id in known]

    def finish(self, every: list[Planned]) -> None:
        """Comparisons, an example, the report, and its figure for a page of text."""
        done = self.done(every)
        found = comparisons(done)
        replace(self.results.with_name("comparisons.json"), json.dumps(found, indent=1) + "\n")
        shown_text = self.example([row for row in every if row.id in {one["id"] for one in done}])
        if shown_text is not None:
            replace(
                self.results.with_name("example.json"), json.dumps(shown_text, ensure_ascii=False, indent=1)
            )
        replace(self.results.with_name("report.html"), page(done, shown_text))
        replace(self.results.with_name("figure.svg"), figure(done))

    def example(self, rows: list[Planned]) -> dict[str, Any] | None:
        """One prompt with all drafters of one trunk: of the trunk that most kinds of drafters share."""
        trunks: dict[str, dict[str, Planned]] = {}
        for row in rows:
            if row.drafter != NONE:
                trunks.setdefault(row.model, {}).setdefault(drafter_name(row.build), row)
        if not trunks:
            return None
        best_trunk = max(trunks.values(), key=lambda kinds: sum(kind in kinds for kind in KINDS))
        found: dict[str, Any] | None = None
        for name, row in best_trunk.items():
            network = self.open(row.model, row.heads)
            found = found or begun(network) | {"setting": row.setting}
            found["drafters"][name] = example(network, row, self.config["num_draft_tokens"])
        return found


COUNTS = {"held_out": "prompts", "validation": "validation_prompts"}


def left(began: float, done: int, count: int) -> str:
    """How long the rest will take if it goes on like this.

    >>> left(time.monotonic() - 120, 1, 3)
    ', about 4 min left'
    """
    if not done:
        return ""
    minutes = (time.monotonic() - began) / done * (count - done) / 60
    return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"


def shown(ids: list[list[int]]) -> Iterable[list[int]]:
    """The prompts, with a progress bar on a terminal."""
    return track(ids, "decoding", console=Console(file=sys.stderr), disable=not sys.stderr.isatty())
