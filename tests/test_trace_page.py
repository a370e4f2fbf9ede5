"""decode.py trace=FILE: one page beside the completions, whole or not at all."""

import json
from pathlib import Path

import pytest
from tiny import spelling_network

import decode


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    network = spelling_network("one, two </pre><b>\n")
    monkeypatch.setattr(decode, "load", lambda config: network)
    monkeypatch.chdir(tmp_path)
    return network


def run(*arguments):
    decode.command(["max_new_tokens=25", "drafter=early_exit", *arguments])


def test_a_page_is_written_and_tells_what_was_decoded(capsys):
    run("prompt=one", "trace=page.html", "output=out.json", "compare=true")
    page = Path("page.html").read_text(encoding="utf-8")
    steps = json.loads(Path("out.json").read_text())["results"][0]["steps"]
    assert f"25 tokens in {steps} steps" in page
    assert page.count("<section>") == 1  # neither the warm-up nor the plain run
    assert "&lt;" in page
    assert "<b>" not in page
    assert sorted(path.name for path in Path().iterdir()) == ["out.json", "page.html"]


def test_every_prompt_of_a_file_has_its_section():
    lines = [{"prompt": text} for text in ("o", "two", "n", "e, t")]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run("prompt_file=prompts.jsonl", "batch_size=3", "trace=page.html", "temperature=1")
    page = Path("page.html").read_text()
    assert [page.count(f"<h2>Prompt {n}</h2>") for n in range(1, 6)] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("value", "named"), [("no/where.html", "no folder"), (".", "is a folder"), ("7", "7")]
)
def test_a_file_that_cannot_be_written_is_refused_before_decoding(capsys, value, named):
    with pytest.raises(SystemExit) as ended:
        run("prompt=one", f"trace={value}")
    out, error = capsys.readouterr()
    assert ended.value.code == 2
    assert error.startswith("trace=")
    assert named in error
    assert len(error.splitlines()) == 1
    assert out == ""


def test_nothing_is_written_where_decoding_fails(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("broken")

    Path("page.html").write_text("before")
    monkeypatch.setattr(decode, "generate", fail)
    with pytest.raises(RuntimeError, match="broken"):
        run("prompt=one", "trace=page.html")
    assert Path("page.html").read_text() == "before"
