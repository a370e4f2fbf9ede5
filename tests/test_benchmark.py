"""The benchmark: what it is given, what it writes, how it goes on after a stop, and mistakes."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys

import hydra
import pytest
import transformers
from tiny import byte_tokenizer, spelling_network, tiny_network

import benchmark
import decode
import entry
from decoding import measuring
from decoding.benchmark_page import (
    LEGEND,
    READING,
    chapters,
    grids,
    heading,
    markdown,
    merged,
    terminal_table,
)
from decoding.prompt_set import prompt_ids, read_items
from decoding.results import read_results
from decoding.standings import OVERALL, UNPREDICTABLE

EXPERIMENTS = sorted(path.stem for path in (entry.CONF / "experiment" / "benchmark").glob("*.yaml"))
PROMPTS = entry.CONF.parent / "benchmarks"
LITTLE = ("drafters=[ngram]", "peers=[]", "theory=0", "repeats=1", "max_new_tokens=4")
SMALL = ["threads=1", "repeats=2", "max_new_tokens=8", "theory=1", "held_out=2", "prompt_tokens=8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark") / "tiny"
    network = tiny_network(vocab_size=258)
    network.tokenizer = byte_tokenizer()
    for name in ("parallel", "medusa", "eagle"):
        del network.heads[name]
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(model):
    lines = [
        {"category": "code", "prompt": "abc"},
        {"category": "chat", "messages": [{"role": "user", "content": "ab"}]},
        {"category": UNPREDICTABLE, "prompt": "d"},
    ]
    path = model.with_name("prompts.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments):
    """The whole command line."""
    entry.run(functools.partial(benchmark.benchmark, argv=list(arguments)), "benchmark", list(arguments))


def command(model, prompts, folder, *arguments):
    drafters = (
        "drafters=[ngram,{drafter: sequential, num_draft_tokens: auto},{drafter: early_exit, exit_layer: 1}]"
    )
    files = (f"output={folder}/out.json", f"table={folder}/out.md")
    return (f"model={model}", f"prompts=[{prompts}]", drafters, *files, *SMALL, *arguments)


@pytest.fixture(scope="module", autouse=True)
def fast():
    """No large array, and no thread setting that would outlive the test."""
    roof = {
        "weight_bytes": 8, "weight_bytes_read": 4, "cache_bytes_per_token": 2, "bandwidth": 400.0,
        "tokens_per_second": 100.0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "roofline", lambda network: roof)
        patch.setattr(benchmark.torch, "set_num_threads", lambda count: None)
        yield


@pytest.fixture(scope="module")
def done(model, prompts):
    """A whole run: its JSON, its page and what it printed."""
    folder, shown = model.parent, io.StringIO()
    with contextlib.redirect_stdout(shown):
        run(*command(model, prompts, folder))
    document = json.loads((folder / "out.json").read_text())
    return document, (folder / "out.md").read_text(), shown.getvalue()


def test_a_run_says_who_was_how_fast_and_where_the_numbers_come_from(done):
    document, page, shown = done
    names = [
        "plain",
        "ngram",
        "sequential auto",
        "early_exit exit_layer=1",
        "transformers",
        "transformers_lookup",
    ]
    assert list(document["standings"]) == [OVERALL, "code", "chat", UNPREDICTABLE]
    for found in document["standings"].values():
        assert list(found) == names
    for key in ("command", "commit", "versions", "machine", "threads", "dtype", "date", "settings", "memory"):
        assert key in document
    assert document["packages"] == {"transformers": transformers.__version__}
    assert document["command"].startswith("python benchmark.py model=")
    assert [row["category"] for row in document["prompts"]] == ["code", "chat", UNPREDICTABLE]
    for row in document["prompts"]:
        for one in row["contenders"].values():
            assert one["identical"]
            assert (one["tokens"], len(one["seconds"])) == (8, 2)
    assert document["prompts"][0]["contenders"]["ngram"]["tested_at_depth"]
    assert all(name in page and name in shown for name in names)


def test_costs_and_what_they_promise_are_there_for_every_drafter(done):
    document = done[0]
    assert list(document["costs"]["scoring"]) == ["1", "2", "3", "4", "5", "6", "8", "12", "16"]
    assert document["costs"]["scoring"]["1"] == 1.0
    assert list(document["costs"]["drafting"]) == list(document["promises"])
    assert len(document["costs"]["drafting"]["early_exit exit_layer=1"]["parts"]["drafting"]) == 2
    for found in document["promises"].values():
        assert found["share"] == found["reached"] / found["whole"]
        assert found["prompts"] == 2  # one of each category but the unpredictable
    assert document["roofline"]["share"] == document["standings"][OVERALL]["plain"]["tokens_per_second"] / 100


def test_waits_for_the_device_are_counted_if_asked_for(model, prompts, tmp_path):
    run(*command(model, prompts, tmp_path, *LITTLE, "syncs=true", "per_category=1", "categories=[chat]"))
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["category"] for row in document["prompts"]] == ["chat"]
    found = document["syncs"]
    assert list(found) == ["plain", "ngram"]
    assert all(one["steps"] == 2 for one in found.values())  # of four steps, the first two are not counted
    assert "Waits of the processor for the device, by step: plain " in (tmp_path / "out.md").read_text()


def test_the_page_is_made_of_the_json_alone(done):
    document, page, _ = done
    assert page == markdown(document)
    assert LEGEND in page
    for grid in grids(document):
        assert len({len(row) for row in (grid.headings, *grid.rows)}) == 1
        assert terminal_table(grid).row_count == len(grid.rows)
        for row in grid.rows:
            assert f"| {' | '.join(row)} |" in page
    assert "nan" not in page.replace(LEGEND, "")


def test_what_is_done_is_not_done_again(model, prompts, tmp_path, monkeypatch):
    little = (*LITTLE, "theory=1")
    run(*command(model, prompts, tmp_path, *little))
    first = json.loads((tmp_path / "out.json").read_text())
    for name in ("race_one", "measure_costs", "promised", "contenders"):
        monkeypatch.setattr(measuring, name, lambda *_: pytest.fail("done again"))
    run(*command(model, prompts, tmp_path, *little))
    assert json.loads((tmp_path / "out.json").read_text()) | {"date": 0} == first | {"date": 0}


def test_a_run_that_is_stopped_says_so_and_goes_on(model, prompts, tmp_path, monkeypatch, capsys):
    honest, raced = measuring.race_one, []

    def race_one(bench, racers, category, ids):
        raced.append(category)
        if len(raced) == 2:
            raise KeyboardInterrupt
        return honest(bench, racers, category, ids)

    monkeypatch.setattr(measuring, "race_one", race_one)
    with pytest.raises(SystemExit) as stopped:
        run(*command(model, prompts, tmp_path, *LITTLE))
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped; the same command goes on from")
    assert not (tmp_path / "out.json").exists()
    assert len(read_results(tmp_path / "out.jsonl")) == 2  # the costs, and one prompt
    run(*command(model, prompts, tmp_path, *LITTLE))
    assert raced == ["code", "chat", "chat", UNPREDICTABLE]


def test_prompts_are_measured_anew_when_anything_changes_that_the_numbers_depend_on(model, prompts, tmp_path):
    for change in ((), ("max_new_tokens=5",), ("num_draft_tokens=2",)):
        before = len(read_results(tmp_path / "out.jsonl"))
        run(*command(model, prompts, tmp_path, *LITTLE, *change))
        rows = list(read_results(tmp_path / "out.jsonl").values())[before:]
        assert sum("contenders" in row for row in rows) == 3


def test_a_package_that_is_not_installed_is_left_out_and_named(model, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "missing", lambda name: "vllm" if name == "vllm_lookup" else None)
    run(*command(model, prompts, tmp_path, *LITTLE, "peers=[transformers,vllm_lookup]"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["left_out"] == {"vllm_lookup": "vllm is not installed"}
    assert "left out: vllm_lookup (vllm is not installed)" in capsys.readouterr().err
    assert "Left out: vllm_lookup (vllm is not installed)." in (tmp_path / "out.md").read_text()


def test_held_out_prompts_are_cut_from_the_held_out_documents(model, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "cut_prompts", lambda network, config: [[5, 6, 7]] * config["prompts"])
    run(*command(model, "held_out", tmp_path, *LITTLE, "per_category=1"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["prompt_ids"] for row in found["prompts"]] == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("drafters=[ngrams]", "drafters: drafter=ngrams is not one of "),
        (
            "drafters=[{drafter: ngram, size: 3}]",
            "drafters: ngram has no option size; it has min_ngram, max_ngram",
        ),
        ("drafters=[{drafter: ngram, num_draft_tokens: x}]", "num_draft_tokens='x' is not a whole number"),
        ("drafters=[{drafter: ngram, verifier: x}]", "verifier='x' is not one of token"),
        ("drafters=[ngram,ngram]", "drafters, peers: ngram is there twice"),
        ("drafters=[medusa]", "drafter=medusa: the network has no medusa head"),
        ("drafters=ngram", "drafters='ngram' is not a list"),
        ("peers=[transfomers]", "peers: 'transfomers' is not one of transformers, "),
        ("peers=[{name: transformers}]", "peers: {'name': 'transformers'} is neither a name nor"),
        ("peers=[{peer: transformers_lookup, n: 3}]", "peers: transformers_lookup has no option n"),
        ("prompts=[]", "prompts=[] names no files"),
        ("prompts=[no.jsonl]", "prompt_file=no.jsonl cannot be read"),
        ("prompts=[no.txt]", "prompts: no.txt is not a .jsonl file"),
        ("repeats=0", "repeats=0 is not a whole number of at least 1"),
        ("categories=[chess]", "categories names chess, which is not one of"),
        ("categories=copy", "categories='copy' is not a list"),
        ("per_category=0", "per_category=0 is not a whole number of at least 1"),
        ("output=nowhere/x.json", "output=nowhere/x.json: there is no folder nowhere"),
        ("output=x.jsonl", "output=x.jsonl: the .jsonl is for what is done"),
        ("compile=3", "compile=3 is not one of auto, true, false"),
        ("packed=3", "packed=3 is not one of auto, true, false"),
        ("model=nowhere/x/y", "model: nowhere/x/y is not a network folder"),
        ("modle=x", "unknown key modle: did you mean model?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(model, prompts, tmp_path, capsys, argument, told):
    with pytest.raises(SystemExit) as stopped:
        run(*command(model, prompts, tmp_path), argument)
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(told)
    assert line.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_the_projects_prompts_are_of_seven_categories_and_all_different():
    items = read_items(str(PROMPTS / "prompts.jsonl"))
    counts = {item.category: 0 for item in items}
    for item in items:
        counts[item.category] += 1
    assert len(items) == 48
    assert len(counts) == 7
    assert all(6 <= count <= 8 for count in counts.values())
    assert len({json.dumps(item.prompt) for item in items}) == 48
    assert {item.category for item in read_items(str(PROMPTS / "unpredictable.jsonl"))} == {UNPREDICTABLE}


def test_decode_takes_the_same_file():
    assert len(decode.read_requests(composed("decode", f"prompt_file={PROMPTS}/prompts.jsonl"), None)) == 48


def test_a_network_without_a_chat_template_takes_the_text_of_the_last_message():
    network = spelling_network("abc")
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]
    assert prompt_ids(network, messages) == prompt_ids(network, "bc")


def test_a_prompt_without_a_category_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"category": "a", "prompt": "x"}\n{"prompt": "x"}\n')
    with pytest.raises(benchmark.UserError, match="prompt 2, has no category"):
        read_items(str(path))


def composed(name, *arguments):
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        return entry.plain(hydra.compose(name, list(arguments)))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_can_be_run(experiment):
    config = composed("benchmark", f"experiment=benchmark/{experiment}")
    benchmark.check_config(config)
    for wanted in config["drafters"]:
        benchmark.read_drafter(wanted, config)
    benchmark.read_peers(config["peers"])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_begins_with_its_command(experiment):
    lines = (entry.CONF / "experiment" / "benchmark" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# python benchmark.py experiment=benchmark/{experiment} output=")


def test_a_network_without_a_tokenizer_needs_prompts_of_ids(tmp_path):
    tiny_network().save_pretrained(tmp_path / "bare")
    path = tmp_path / "ids.jsonl"
    path.write_text('{"category": "a", "prompt_ids": [1, 2, 3]}\n')
    run(*command(tmp_path / "bare", path, tmp_path, *LITTLE))
    assert json.loads((tmp_path / "out.json").read_text())["prompts"][0]["prompt_ids"] == [1, 2, 3]


def test_a_page_keeps_its_other_chapters_and_gets_this_one_anew(done):
    document, page, _ = done
    other = merged(page, document | {"dtype": "bfloat16"})
    assert list(chapters(other)) == [
        "",
        heading(document),
        heading(document | {"dtype": "bfloat16"}),
        READING,
    ]
    again = merged("Before.\n" + other, document | {"commit": "abc"})
    assert chapters(again)[""] == "Before."
    assert list(chapters(again)) == list(chapters(other))
    assert "commit abc" in chapters(again)[heading(document)]
    assert merged(again, document | {"commit": "abc"}) == again
    assert again.count(LEGEND) == 1
    alone = document | {"settings": document["settings"] | {"peers": []}}
    assert heading(alone) == f"{heading(document)}, without other packages"


@pytest.mark.slow
def test_the_gpu_script_runs_every_part_and_counts_what_failed(model, prompts, tmp_path):
    """Here on a CPU: its tests are skipped, and compiling is what the machine makes of it."""
    done = subprocess.run(
        [PROMPTS / "gpu.sh", tmp_path, model, f"prompts=[{prompts}]", *SMALL, *LITTLE, "per_category=1"],
        env=os.environ
        | {"PYTHON": sys.executable, "DTYPE": "float32", "OMP_NUM_THREADS": "1"}
        | {"PAGE": str(tmp_path / "page.md"), "PATIENCE": "3", "PYTEST_ADDOPTS": "-n0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    for part in ("tests", "plain", "compiled"):
        assert f"== {part}: status 0" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 parts failed")
    found = chapters((tmp_path / "page.md").read_text())
    assert [title.rpartition(" ")[2] for title in found if title.startswith(f"# {model}")] == [
        "packed",
        "compiled",
    ]
    assert all(
        "Waits of the processor for the device" in text
        for title, text in found.items()
        if str(model) in title
    )
