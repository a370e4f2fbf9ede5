"""Tables in documentation are written from results between marks."""

import json

import pytest
from page_rows import synthetic_row

from ablation.page_numbers import written


@pytest.fixture
def root(tmp_path):
    rows = [synthetic_row("joint", "joint", "sequential", seed) for seed in range(2)]
    for row, speed in zip(rows, (1.0, 1.5), strict=True):
        row["measured"]["greedy"] |= {
            "speedup": speed,
            "tau": 2.0,
            "conditional": [0.5, 0.25],
            "draft_cost": 0.125,
        }
        row["measured"]["sampled"]["tau"] = 1.75
    folder = tmp_path / "docs/ablation/small"
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def marked(drafter: str, inside: str = "") -> str:
    return f"before\n<!-- numbers: {drafter} -->\n{inside}<!-- end of numbers -->\nbehind\n"


def test_seeds_are_one_line_with_their_mean(root):
    lines = written(marked("sequential", "| old | 9.99 |\n"), root).splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "behind"
    assert "9.99" not in "".join(lines)
    cells = "| small | joint tokens joint | `sequential` | 2 | 0.50 0.25 | 2.00 | 1.75 | 0.12 | 1.25 |"
    assert lines[5] == cells


def test_a_drafter_without_results_says_so(root):
    assert "No results for `medusa` are committed yet." in written(marked("medusa"), root)


def test_what_was_written_stays_as_it_is(root):
    once = written(marked("all"), root)
    assert written(once, root) == once


def test_a_file_of_its_own_and_rows_of_the_first_schema_are_read(root):
    counts = {"tau": 3.0, "conditional": [1.0], "draft_cost": None, "speedup": None}
    row = {"id": "x", "network": "n", "drafter": "ngram", "greedy": counts, "sampled": {"tau": 1.5}}
    (root / "old.jsonl").write_text(json.dumps(row) + "\n")
    text = written("<!-- numbers: all from old.jsonl -->\n<!-- end of numbers -->", root)
    assert "| old | n | `ngram` | 1 | 1.00 | 3.00 | 1.50 | n/a | n/a |" in text
    assert "small" not in text
