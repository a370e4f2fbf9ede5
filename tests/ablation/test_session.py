"""A whole ablation: what it writes, and that it goes on where it was stopped."""

import json
import re

import pytest

import ablate
from ablation.session import Session
from decoding.results import read_results

TIMES = {"c", "tokens/s", "speedup", "predicted", "best length"}  # columns that a clock tells


@pytest.mark.slow
def test_an_ablation_that_was_stopped_ends_with_the_same_table(config, tmp_path, capsys, monkeypatch):
    """Some 20 rows of tiny networks: searched, trained, measured; once in one go, once with a stop."""
    ablate.ablate(config, ["experiment=x"])
    out, other = tmp_path / "out", tmp_path / "other"
    rows = list(read_results(out / "results.jsonl").values())
    check_rows(rows)
    assert len(read_results(out / "search.jsonl")) == 8
    for name in ("table.md", "report.html", "comparisons.json", "example.json", "figure.svg"):
        assert (out / name).stat().st_size > 100
    capsys.readouterr()
    ablate.ablate(config, [])
    assert f"{len(rows)} rows, {len(rows)} of them done already" in capsys.readouterr().err
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        ablate.ablate(config | {"out": str(other)}, [])
    monkeypatch.undo()
    ablate.ablate(config | {"out": str(other)}, [])
    assert apart_from_times(out / "table.md") == apart_from_times(other / "table.md")


def check_rows(rows):
    names = {(row["setting"], row["network"], row["drafter"], row["budget"]) for row in rows}
    for drafter in ("parallel", "sequential"):
        assert ("equal_parameters", drafter, drafter, "flops") in names
        assert ("frozen_trunk", drafter, drafter, "tokens") in names
    assert {("equal_parameters", f"plain_{layers}", "ngram", "tokens") for layers in (2, 3)} <= names
    assert all(row["measured"]["greedy"]["identical"] for row in rows)
    frozen = [row for row in rows if row["setting"] == "frozen_trunk"]
    assert all(row["trunk"]["loss"] == pytest.approx(row["trunk"]["loss_alone"]) for row in frozen)
    for row in rows:
        trained = row["drafter"] in ("parallel", "sequential")
        assert bool(row["parameters"]["head"]) == trained
        assert row["measured"]["greedy"]["speedup"] > 0
        assert re.search(r"only=\[\"", row["command"])
        if row["drafter"] != "none":
            assert row["chosen"]["by"] == "timed"
            assert len(row["expected"]["greedy"]) == 3
    by_budget = {row["budget"]: row for row in rows if row["network"] == row["drafter"] == "sequential"}
    assert by_budget["flops"]["training"]["flops"] <= by_budget["tokens"]["training"]["flops"]
    json.dumps(rows, allow_nan=False)


def stop_after(monkeypatch, count):
    measured = []
    before = Session.row

    def row(self, planned):
        if len(measured) == count:
            raise KeyboardInterrupt
        measured.append(planned.name)
        return before(self, planned)

    monkeypatch.setattr(Session, "row", row)


def apart_from_times(path):
    """The table's cells without those of the clock."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    keep = [index for index, name in enumerate(cells[0]) if name not in TIMES]
    return [[line[index] for index in keep] for line in cells]


def test_times_are_filled_in_later(tmp_path, config):
    """A row without times keeps its id, and its other numbers, when a later call has time for them."""
    name = "equal_parameters/early_exit/early_exit"
    quick = config | {"timed": False, "only": [name]}
    ablate.ablate(quick, [])
    path = tmp_path / "out" / "results.jsonl"
    (before,) = read_results(path).values()
    assert before["measured"]["greedy"]["speedup"] is None
    assert before["predicted"]["speedup"] is None
    assert before["predicted"]["speedup_32_layers"] > 0
    assert before["chosen"]["by"] == "weights"
    ablate.ablate(quick | {"timed": True, "repeats": 2}, [])
    (after,) = read_results(path).values()
    assert after["id"] == before["id"]
    assert after["measured"]["greedy"]["speedup"] > 0
    assert after["measured"]["greedy"]["identical"]
    for key in ("training", "trunk", "draft_flops", "cache_bytes"):
        assert after[key] == before[key]
    assert after["expected"]["greedy"] == before["expected"]["greedy"]
