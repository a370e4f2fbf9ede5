"""Rows of results as a table."""

from decoding.table import COLUMNS, LEGEND, table


def entries(tau):
    return [{"length": length, "tau": tau} for length in range(1, 9)]


def result(**changes):
    greedy = {
        "tau": 1.5, "alpha": 0.25, "conditional": [0.3, 0.2], "draft_cost": 0.01,
        "tokens_per_second": 321.4, "speedup": 1.25, "identical": True,
    }  # fmt: skip
    row = {
        "setting": "equal_parameters", "network": "sequential", "drafter": "ngram", "seed": 0,
        "budget": "tokens", "command": "python ablate.py 'only=[\"a\"]'", "commit": "abc",
        "machine": "A processor", "threads": 2, "dtype": "float32", "form": "compiled",
        "versions": {"python": "3.11", "torch": "2.13", "transformers": "5.24"},
        "settings": {
            "prompts": 20, "prompt_tokens": 64, "max_new_tokens": 128, "num_draft_tokens": 4,
            "verifier": "token", "temperature": 1.0, "repeats": 3,
        },
        "training": {"tokens": 614400}, "parameters": {"trunk": 9, "head": 1234}, "draft_flops": 2_500_000,
        "trunk": {"loss": 5.1, "loss_alone": 5.0, "repeated_4grams": 0.5},
        "expected": {"greedy": entries(1.6), "token": entries(1.2), "block": []},
        "chosen": {"num_draft_tokens": 3, "verifier": "block"},
        "measured": {"greedy": greedy, "sampled": {"tau": 1.1}, "speedup_interval": [1.0, 1.5]},
        "predicted": {"speedup": 1.3, "speedup_32_layers": 1.4},
    }  # fmt: skip
    return row | changes


def untimed():
    """Of a drafter that drafts nothing, not timed."""
    greedy = dict.fromkeys(result()["measured"]["greedy"]) | {
        "tau": 1.0,
        "conditional": [],
        "identical": True,
    }
    return result(
        drafter="none", training=None, expected=None,
        trunk={"loss": 5.1, "loss_alone": None, "repeated_4grams": None},
        chosen={"num_draft_tokens": None, "verifier": None},
        measured={"greedy": greedy, "sampled": {"tau": 1.0}, "speedup_interval": None},
        predicted={"speedup": None, "speedup_32_layers": None},
    )  # fmt: skip


def cells(row) -> list[str]:
    return [cell.strip() for cell in table([row]).splitlines()[2].strip("|").split("|")]


def test_a_row_shows_its_numbers_in_the_order_of_the_columns():
    assert cells(result()) == [
        "equal_parameters", "sequential", "ngram", "0", "614,400", "1,234", "2.50", "5.100 (+0.100)",
        "0.30 0.20", "1.50", "1.10", "1.60 / 1.20 / n/a", "0.01", "321", "1.25 [1.00, 1.50]", "1.30", "1.40",
        "3 block", "yes", "50%",
    ]  # fmt: skip


def test_a_budget_of_flops_stands_beside_the_setting():
    assert cells(result(budget="flops"))[0] == "equal_parameters, equal flops"


def test_a_number_that_does_not_exist_is_not_available_and_never_nan():
    found = dict(zip(COLUMNS, cells(untimed()), strict=True))
    for name in ("tokens", "c", "tokens/s", "speedup", "predicted", "expected τ", "best length"):
        assert found[name] == "n/a"
    assert "nan" not in table([untimed()]).replace(LEGEND, "").lower()


def test_ids_that_differ_from_plain_decoding_cannot_be_overlooked():
    measured = result()["measured"]
    assert "NO" in cells(result(measured=measured | {"greedy": measured["greedy"] | {"identical": False}}))


def test_every_line_of_the_table_has_the_same_number_of_cells():
    lines = [line for line in table([result(), untimed()]).splitlines() if line.startswith("|")]
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


def test_a_table_of_nothing_is_no_failure():
    assert "Nothing is done yet" in table([])
