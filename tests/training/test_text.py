import json
import sysconfig
from pathlib import Path

import datasets
import pytest

from mtp.errors import UserError
from training.files import Files
from training.text import Document, HubDataset, Stdlib


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refusal(source) -> str:
    with pytest.raises(UserError) as caught:
        source.documents()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_standard_library_is_its_own_py_files_in_order():
    names = [document.name for document in Stdlib().documents()]
    assert names == sorted(names)
    assert {"argparse.py", "encodings/cp1252.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "__pycache__" in name]
    root = Path(sysconfig.get_path("stdlib"))
    assert all((root / name).is_file() for name in names)


def test_the_library_root_can_be_named_and_files_that_are_not_utf8_or_empty_are_left_out(tmp_path):
    write(tmp_path / "b.py", "b = 1\n")
    write(tmp_path / "a" / "a.py", "a = 1\r\n")
    write(tmp_path / "a" / "__init__.py", "")
    write(tmp_path / "latin.py", b"x = '\xe9'\n")
    write(tmp_path / "site-packages" / "c.py", "c = 1\n")
    write(tmp_path / "readme.txt", "no code\n")
    assert Stdlib(str(tmp_path)).documents() == [Document("a/a.py", "a = 1\n"), Document("b.py", "b = 1\n")]


def test_a_library_root_that_is_missing_or_without_code_is_refused(tmp_path):
    assert str(tmp_path / "none") in refusal(Stdlib(str(tmp_path / "none")))
    assert str(tmp_path) in refusal(Stdlib(str(tmp_path)))


def test_one_file_is_one_document_whatever_looks_like_a_line_end(tmp_path):
    path = write(tmp_path / "text.txt", "a\u2028b\u0085c\n")
    assert Files(path).documents() == [Document("text.txt", "a\u2028b\u0085c\n")]


def test_crlf_becomes_lf_and_a_byte_order_mark_is_no_text(tmp_path):
    path = write(tmp_path / "text.txt", b"\xef\xbb\xbfa\r\nb\r\n")
    assert Files(path).documents()[0].text == "a\nb\n"


def test_a_folder_and_a_glob_give_the_same_names(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden/d.txt", "deep/.e.txt", "blank.txt"):
        write(tmp_path / name, "" if name == "blank.txt" else f"text of {name}\n")
    expected = ["a.txt", "b.txt", "deep/c.txt"]
    assert [document.name for document in Files(str(tmp_path)).documents()] == expected
    assert [document.name for document in Files(str(tmp_path / "**" / "*.txt")).documents()] == expected


def test_a_list_of_paths_reads_each_file_once(tmp_path):
    first, second = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    names = [document.name for document in Files([second, first, str(tmp_path)]).documents()]
    assert names == ["b.txt", "a.txt"]


@pytest.mark.parametrize("content", ["", "\n\n\n", " \r\n\t\ufeff".replace("\ufeff", "")])
def test_a_file_without_text_is_refused_by_name(tmp_path, content):
    path = write(tmp_path / "empty.txt", content)
    assert path in refusal(Files(path))


def test_a_path_that_is_missing_unset_or_matches_nothing_is_refused_by_name(tmp_path):
    assert "data.source.path" in refusal(Files())
    for path in (tmp_path / "none.txt", tmp_path, tmp_path / "*.txt"):
        assert str(path) in refusal(Files(str(path)))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bad_utf8_is_refused_with_file_and_line(tmp_path, mark):
    path = write(tmp_path / "bad.txt", mark + b"one\ntwo\nthr\xffee\n")
    assert f"{path} line 3" in refusal(Files(path))
    assert "0xff" in refusal(Files(path))


def test_a_line_of_thirty_megabytes_is_read(tmp_path):
    path = write(tmp_path / "long.txt", "word " * 6_000_000)
    assert len(Files(path).documents()[0].text) == 30_000_000


def test_every_jsonl_line_is_a_document(tmp_path):
    records = [{"text": "a\r\nb"}, {"text": "c\u2028d", "other": 1}, {"text": " "}]
    path = write(tmp_path / "data.jsonl", b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, records)).encode())
    expected = [Document("data.jsonl:1", "a\nb"), Document("data.jsonl:3", "c\u2028d")]
    assert Files(path).documents() == expected


def test_another_jsonl_field_can_be_named(tmp_path):
    path = write(tmp_path / "data.jsonl", '{"body": "hello"}\n')
    assert Files(path, field="body").documents() == [Document("data.jsonl:1", "hello")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "b"', "not JSON"),
        ('{"body": "b"}', "no field 'text'"),
        ('["b"]', "no field 'text'"),
        ('{"text": 3}', "must be a string, found int"),
        ('{"text": null}', "must be a string, found NoneType"),
        (r'{"text": "\ud800"}', "surrogate"),
    ],
)
def test_a_broken_jsonl_line_is_refused_with_file_and_line(tmp_path, line, reason):
    path = write(tmp_path / "data.jsonl", '{"text": "a"}\n' + line + "\n")
    message = refusal(Files(path))
    assert f"{path} line 2" in message
    assert reason in message


def test_files_named_for_validation_validate_and_nothing_else(tmp_path):
    for name in ("a.txt", "b.txt", "val.txt"):
        write(tmp_path / name, name)
    source = Files(str(tmp_path), validation=str(tmp_path / "val.txt"))
    assert [document.name for document in source.documents()] == ["a.txt", "b.txt"]
    assert source.validation_documents() == [Document("val.txt", "val.txt")]
    assert Files(str(tmp_path)).validation_documents() is None
    assert "data.source.validation" in refusal(Files(str(tmp_path), validation=str(tmp_path)))


def test_a_saved_dataset_is_read_from_its_folder(tmp_path):
    table = datasets.Dataset.from_dict({"text": ["a\r\n", "", "b"], "n": [1, 2, 3]})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "many"))
    expected = [Document("train:0", "a\n"), Document("train:2", "b")]
    assert HubDataset(str(tmp_path / "one")).documents() == expected
    assert HubDataset(str(tmp_path / "many")).documents() == expected
    assert "'test'" in refusal(HubDataset(str(tmp_path / "many"), split="test"))
    assert "'body'" in refusal(HubDataset(str(tmp_path / "one"), field="body"))
    assert "record 0" in refusal(HubDataset(str(tmp_path / "one"), field="n"))


def test_a_stream_gives_its_first_records_and_needs_to_know_how_many(monkeypatch):
    def load_dataset(path, name, split, streaming):
        rows = datasets.Dataset.from_dict(
            {"text": ["a", "b", "c"], "talk": [[{"role": "user", "content": "x"}]] * 3}
        )
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for streaming in (False, True):
        found = HubDataset("owner/name", streaming=streaming, records=2).documents()
        assert found == [Document("train:0", "a"), Document("train:1", "b")]
    assert "needs data.source.records" in refusal(HubDataset("owner/name", streaming=True))
    assert "records=0" in refusal(HubDataset("owner/name", records=0))
    talks = HubDataset("owner/name", field="talk", records=1).documents()
    assert talks == [Document("train:0", "x", messages=[{"role": "user", "content": "x"}])]


def test_a_dataset_is_otherwise_loaded_by_name_and_its_failure_told_in_one_line(monkeypatch, tmp_path):
    def load_dataset(path, name, split, streaming):
        if path == "owner/broken":
            raise ValueError("first line\nsecond line")
        return datasets.Dataset.from_dict({"text": [f"{path} {name} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert HubDataset("owner/name", name="small").documents() == [
        Document("train:0", "owner/name small train")
    ]
    assert "first line" in refusal(HubDataset("owner/broken"))
    assert "does not exist" in refusal(HubDataset(str(tmp_path / "none")))
    assert "not set" in refusal(HubDataset())
