"""Rows of results as a table."""

from decoding.table import LEGEND, in_short, table


def result(**changes):
    row = {
        "network": "sequential", "drafter": "ngram", "training_tokens": 614400,
        "validation": {"val/trunk/loss": 5.1},
        "command": "python ablate.py", "commit": "abc", "seed": 0, "machine": "A processor",
        "dtype": "float32", "form": "compiled",
        "versions": {"python": "3.11", "torch": "2.13", "transformers": "5.24"},
        "settings": {
            "prompts": 20, "prompt_tokens": 64, "max_new_tokens": 128, "num_draft_tokens": 4,
            "verifier": "token", "temperature": 1.0, "repeats": 3, "threads": 2,
        },
        "greedy": {
            "tau": 1.5, "alpha": 0.25, "conditional": [0.3, 0.2], "draft_cost": 0.01,
            "tokens_per_second": 321.4, "speedup": 1.25, "identical": True, "repeated_4grams": 0.5,
        },
        "sampled": {"tau": 1.1},
    }  # fmt: skip
    return row | changes


def nothing_drafted():
    greedy = result()["greedy"] | {"alpha": None, "conditional": [], "draft_cost": None}
    return result(drafter="none", training_tokens=None, validation={}, greedy=greedy)


def cells(row) -> list[str]:
    return [cell.strip() for cell in table([row]).splitlines()[2].strip("|").split("|")]


def test_a_row_shows_its_numbers_in_the_order_of_the_columns():
    assert cells(result()) == [
        "sequential", "ngram", "614,400", "5.100", "0.30 0.20", "1.50", "1.10", "0.25", "0.01", "321", "1.25",
        "yes", "50%",
    ]  # fmt: skip


def test_a_number_that_does_not_exist_is_not_available_and_never_nan():
    assert cells(nothing_drafted())[2:9] == ["n/a", "n/a", "n/a", "1.50", "1.10", "n/a", "n/a"]
    assert "nan" not in table([nothing_drafted()]).replace(LEGEND, "").lower()


def test_ids_that_differ_from_plain_decoding_cannot_be_overlooked():
    assert "NO" in cells(result(greedy=result()["greedy"] | {"identical": False}))


def test_every_line_of_the_table_has_the_same_number_of_cells():
    lines = [line for line in table([result(), nothing_drafted()]).splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_says_where_its_numbers_come_from():
    text = table([result(), result(commit=None)])
    for part in (
        "`python ablate.py`",
        "commit abc or unknown",
        "seed 0",
        "A processor, 2 threads",
        "float32",
    ):
        assert part in text


def test_the_line_for_the_terminal_names_what_it_shows():
    assert in_short(result()).startswith("τ 1.50, τ sampled 1.10, α 0.25")
