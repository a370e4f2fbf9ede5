"""The file of results."""

import pytest

from decoding.results import add_result, identity, read_results
from mtp import UserError


def test_equal_configs_have_one_identity_and_any_change_gives_another():
    config = {"a": 1, "b": {"c": [1, 2], "d": None}}
    assert identity(config) == identity({"b": {"d": None, "c": [1, 2]}, "a": 1})
    assert identity(config) != identity({"a": 1, "b": {"c": [2, 1], "d": None}})


def test_rows_are_read_as_they_were_added(tmp_path):
    rows = [{"id": "x", "text": "a\u2028b\n"}, {"id": "y", "value": None}]
    for row in rows:
        add_result(tmp_path / "results.jsonl", row)
    assert list(read_results(tmp_path / "results.jsonl").values()) == rows


def test_a_row_that_is_measured_again_replaces_the_older_one(tmp_path):
    for row in ({"id": "x", "value": 1}, {"id": "y"}, {"id": "x", "value": 2}):
        add_result(tmp_path / "results.jsonl", row)
    assert read_results(tmp_path / "results.jsonl") == {"y": {"id": "y"}, "x": {"id": "x", "value": 2}}


def test_a_row_with_a_nan_is_not_written_and_the_file_stays_whole(tmp_path):
    add_result(tmp_path / "results.jsonl", {"id": "x"})
    with pytest.raises(ValueError, match="JSON"):
        add_result(tmp_path / "results.jsonl", {"id": "y", "value": float("nan")})
    assert list(read_results(tmp_path / "results.jsonl")) == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("line", ['{"id": "y', '["y"]', '{"name": "y"}'])
def test_a_line_that_is_no_row_is_told_with_its_number(tmp_path, line):
    (tmp_path / "results.jsonl").write_text('{"id": "x"}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        read_results(tmp_path / "results.jsonl")
