"""decode.py from the command line to its JSON: what arrives, what is reported, what is refused."""

import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import get_method
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_network

import decode
import entry
from decoding import generate
from mtp import Network

ROOT = Path(__file__).parents[1]
DRAFTER_FILES = sorted((ROOT / "conf" / "drafter").glob("*.yaml"))
DOCUMENT = {
    "schema", "model", "drafter", "verifier", "num_draft_tokens", "seed", "results", "plain", "identical",
    "speedup",
}  # fmt: skip
RESULT = {
    "prompt", "prompt_ids", "token_ids", "text", "finish_reason", "steps", "tau", "alpha", "drafted",
    "tested", "accepted", "tested_at_depth", "accepted_at_depth", "logprobs", "seconds", "tokens_per_second",
}  # fmt: skip
HARD_PROMPTS = [
    "李明", "🙂", "hello!", "#", "it's", "x=1", "Hello, world", "[INST] hi [/INST]", "def f(x):", "${foo}",
    "C:\\dir\\", '"q"', "two\nlines", "\r\n\t", '"李明"', '"C:\\dir\\"', "'", "a,b", "{a: 1}", "~x", "+y=1",
    "1_1_1", "1e3", "true", "null", "007", " padded ", "[a,b]", "prompt=x", "-m", "--help", "=", "\\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Network:
    network = tiny_network(layers=2, vocab_size=258)
    network.tokenizer = byte_tokenizer()
    return network


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("networks") / "tiny"
    tiny.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config() -> dict:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return entry.plain(hydra.compose("decode", ["drafter=none"]))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> Path:
    """Every call starts in a folder of its own, where nothing but the output may appear."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def loaded(tiny, monkeypatch):
    """Spares the loading where it is not what is looked at."""
    monkeypatch.setattr(decode, "load", lambda config: tiny)


def reported(*arguments: str) -> dict:
    """The JSON of one call."""
    decode.command(["max_new_tokens=3", *arguments, "output=out.json"])
    assert os.listdir() == ["out.json"]
    document = json.loads(Path("out.json").read_text(encoding="utf-8"))
    os.remove("out.json")
    return document


def arrived(config: dict, argument: str) -> dict:
    """The result of one call whose argument never reaches Hydra, or reaches it in the plainest form."""
    rest, literal = decode.lift([argument])
    changes = dict(argument.split("=", 1) for argument in rest)
    decode.main(config | {"output": "out.json", "max_new_tokens": 1, "stream": False} | changes, literal)
    (result,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["results"]
    return result


def ids(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def test_the_json_has_the_keys_of_the_contract_and_numbers_that_agree(folder, tiny, capsys):
    document = reported(f"model={folder}", "prompt=ab", "max_new_tokens=20", "seed=3", "num_draft_tokens=2")
    assert set(document) >= DOCUMENT
    assert (document["schema"], document["model"], document["seed"]) == (1, str(folder), 3)
    assert (document["drafter"], document["verifier"]) == ("sequential", "token")
    assert document["num_draft_tokens"] == 2
    assert (document["plain"], document["identical"], document["speedup"]) == (None, None, None)
    (result,) = document["results"]
    assert set(result) >= RESULT
    assert (result["prompt"], result["prompt_ids"]) == ("ab", ids("ab"))
    expected = generate(tiny, "ab", max_new_tokens=20)[0]
    assert (result["token_ids"], result["text"]) == (expected.token_ids, expected.text)
    assert result["finish_reason"] == "length"
    assert result["logprobs"] is None
    assert result["tau"] == 20 / result["steps"]
    assert result["tested"] == sum(result["tested_at_depth"])
    assert result["accepted"] == sum(result["accepted_at_depth"])
    assert result["alpha"] == result["accepted"] / result["tested"]
    assert result["tested"] <= result["drafted"]
    assert result["tokens_per_second"] == pytest.approx(20 / result["seconds"])
    printed = capsys.readouterr()
    assert printed.out.startswith("ab" + expected.text + "\n")
    assert "tokens in" in printed.out
    assert printed.err == ""


def test_comparing_adds_plain_decoding_and_whether_it_is_the_same(loaded, capsys):
    document = reported("prompt=ab", "compare=true", "max_new_tokens=12")
    assert document["identical"] is True
    assert document["speedup"] > 0
    assert document["plain"][0]["token_ids"] == document["results"][0]["token_ids"]
    assert set(document["plain"][0]) == set(document["results"][0])
    assert document["plain"][0]["tau"] == 1
    assert "; identical\n" in capsys.readouterr().out


def test_of_sampled_text_identity_is_not_said(loaded, capsys):
    document = reported("prompt=ab", "compare=true", "temperature=1", "seed=5")
    assert document["identical"] is None
    assert "only the law is the same" in capsys.readouterr().out


def test_a_seed_repeats_and_another_differs(loaded):
    first, again, other = (
        reported("prompt=ab", "temperature=2", f"seed={seed}", "max_new_tokens=12")["results"][0]["token_ids"]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("prompt", HARD_PROMPTS)
def test_a_prompt_arrives_to_the_last_byte_however_it_is_given(loaded, config, tmp_path, monkeypatch, prompt):
    path = tmp_path / "prompt.txt"
    path.write_bytes(prompt.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    for argument in (f"prompt={prompt}", f"prompt_file={path}", "prompt_file=-"):
        result = arrived(config, argument)
        assert result["prompt"] == prompt
        assert result["prompt_ids"] == ids(prompt)


def test_on_the_whole_way_hydra_sees_nothing_of_the_prompt(loaded):
    for prompt in ("1_1_1", ' [INST] ${foo}, it\'s = "q" #\n\\'):
        assert reported(f"prompt={prompt}")["results"][0]["prompt"] == prompt


def test_lines_of_a_jsonl_file_have_settings_of_their_own_in_any_batch(loaded, tmp_path):
    lines = [
        {"prompt": "ab", "temperature": 1.0, "seed": 4}, {"prompt": "a longer one"},
        {"prompt_ids": [70, 80], "max_new_tokens": 5}, {"prompt": "c", "temperature": 1.0},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    alone, together = (
        reported(f"prompt_file={path}", f"batch_size={size}", "max_new_tokens=9")["results"]
        for size in (1, 3)
    )
    assert [row["token_ids"] for row in alone] == [row["token_ids"] for row in together]
    assert [len(row["token_ids"]) for row in alone] == [9, 9, 5, 9]
    last = reported("prompt=c", "temperature=1", "seed=3", "max_new_tokens=9")["results"][0]
    assert last["token_ids"] == alone[3]["token_ids"]  # row r of seed s has seed s + r


def test_token_ids_are_a_prompt_too(loaded):
    (result,) = reported("prompt_ids=[67,68]")["results"]
    assert (result["prompt"], result["prompt_ids"]) == ("AB", [67, 68])


def test_a_folder_without_a_tokenizer_decodes_ids_without_text(folder, tmp_path, capsys):
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    (result,) = reported(f"model={bare}", "prompt_ids=[67,68]")["results"]
    assert (result["prompt"], result["text"]) == (None, None)
    assert capsys.readouterr().out.startswith(" ".join(map(str, result["token_ids"])))


def test_heads_may_come_from_another_folder(folder, tmp_path):
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("heads"))
    expected = reported(f"model={folder}", "prompt=ab", "max_new_tokens=9")["results"][0]
    grafted = reported(f"model={plain}", f"heads={folder}", "prompt=ab", "max_new_tokens=9")["results"][0]
    assert grafted["token_ids"] == expected["token_ids"]
    assert grafted["accepted_at_depth"] == expected["accepted_at_depth"]


def test_stop_strings_are_taken_literally_or_as_a_list(loaded, tiny):
    text = generate(tiny, "ab", max_new_tokens=40)[0].text
    kept = reported("prompt=ab", f"stop={text[3:5]}", "max_new_tokens=40")["results"][0]
    assert kept["finish_reason"] == "stop"
    assert kept["text"] == text[: text.index(text[3:5]) + 2]
    whole = reported("prompt=ab", "stop=[never,ever]", "max_new_tokens=5")["results"][0]
    assert whole["finish_reason"] == "length"


@pytest.mark.parametrize("stream", ["true", "false"])
def test_the_text_is_printed_once_streamed_or_whole(loaded, tiny, capsys, stream):
    reported("prompt=ab", f"stream={stream}")
    text = "ab" + generate(tiny, "ab", max_new_tokens=3)[0].text
    assert capsys.readouterr().out.startswith(text + "\n")


def test_in_a_multirun_a_bare_comma_makes_two_prompts_and_a_quoted_one_makes_one(loaded, capsys):
    for argument, runs in (("prompt=a,b", 2), ('prompt="a,b"', 1), ("prompt='x','y','z'", 3)):
        decode.command(["-m", "max_new_tokens=1", argument])
        assert capsys.readouterr().out.count("tokens in 1 steps") == runs
        assert os.listdir() == []


def test_no_more_threads_of_text_than_one_are_streamed_at_a_time(loaded, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}')
    rows = reported(f"prompt_file={path}", "batch_size=2")["results"]
    out = capsys.readouterr().out
    assert out.startswith(f"one{rows[0]['text']}\ntwo{rows[1]['text']}\n")


BAD_INPUT = [
    (["drafter=sequental"], "drafter=sequental is not one of"),
    (["drafter=[ngram,none]"], "one drafter is needed, not a list"),
    (["drafter=null"], "drafter=null is not one of"),
    (["drafter="], "drafter= is not one of"),
    (["~drafter"], "drafter is missing"),
    (["promt=hi"], "unknown key promt: did you mean prompt?"),
    (["+promt=hi"], "unknown key promt"),
    (["drafter.exit=1"], "unknown key drafter.exit"),
    (["drafter=early_exit", "drafter.exit_layer=2"], "exit_layer=2 is not a whole number from 1 to 1"),
    (["drafter=early_exit", "drafter.exit_layer=2.5"], "exit_layer=2.5"),
    (["drafter=ngram", "drafter.min_ngram=0"], "min_ngram=0"),
    (["drafter=ngram", "drafter.min_ngram=9"], "min_ngram=9, max_ngram=4"),
    (["num_draft_tokens=-1"], "num_draft_tokens=-1 is not a whole number of at least 0"),
    (["num_draft_tokens=4.0"], "num_draft_tokens=4.0"),
    (["num_draft_tokens=abc"], "num_draft_tokens='abc'"),
    (["temperature=nan"], "temperature=nan is not a finite number"),
    (["temperature=inf"], "temperature=inf"),
    (["temperature=-1"], "temperature=-1"),
    (["top_p=1.5"], "top_p=1.5"),
    (["verifier=tokn"], "verifier='tokn' is not one of token, block"),
    (["max_new_tokens=-1"], "max_new_tokens=-1"),
    (["seed=1e30"], "seed=1e+30"),
    (["stop="], "stop: '' is not a text of at least one character"),
    (["stop=[null,1_1]"], "stop: None is not a text"),
    (["eos_token_ids=x"], "eos_token_ids='x'"),
    (["prompt="], "prompt is empty"),
    (["prompt_ids=[]"], "prompt_ids is empty"),
    (["prompt_ids=[258]"], "prompt_ids: 258 is not a whole number from 0 to 257"),
    (["prompt_file=none.txt"], "prompt_file=none.txt cannot be read (No such file or directory)"),
    (["prompt=" + "x" * 256], "prompt has 256 tokens, but the context holds 256"),
    (["prompt=x", "prompt_ids=[1]"], "prompt_ids and prompt are both given"),
    (["prompt=\udcff"], "prompt is not Unicode text"),
    (["max_new_tokens="], "max_new_tokens="),
    (["top_k=[1"], "cannot read 'top_k=[1'"),
    (["model="], "model='' is not a text"),
    (["heads=none"], "model: none is not a network folder"),
    (["dtype=int8"], "dtype=int8 is not one of float32, bfloat16, float16"),
    (["device=tpu7"], "device=tpu7 cannot be used here"),
    (["output=no/such/folder/out.json"], "output=no/such/folder/out.json: there is no folder no/such/folder"),
    (["output=."], "output=. is a folder"),
    (["compare=perhaps"], "compare='perhaps' is neither true nor false"),
    (["--nosuch"], "unrecognized arguments: --nosuch; keys are said as key=value"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_a_mistake_ends_with_status_2_one_line_and_nothing_written(folder, capsys, arguments, told):
    refused([f"model={folder}", "output=out.json", *arguments], told, capsys)


def refused(arguments: list[str], told: str, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        decode.command(arguments)
    printed = capsys.readouterr()
    assert error.value.code == 2
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    assert told in printed.err
    assert printed.out == ""
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["model.safetensors", "heads/parallel/model.safetensors"])
def test_a_network_that_was_cut_off_is_refused_by_its_file(folder, tmp_path, capsys, name):
    cut = shutil.copytree(folder, tmp_path / "cut")
    (cut / name).write_bytes((cut / name).read_bytes()[:-100])
    refused([f"model={cut}", "output=out.json"], f"{name} is not a whole safetensors file", capsys)


def test_a_missing_network_is_refused_by_its_folder(tmp_path, capsys):
    refused([f"model={tmp_path}/none"], "none is not a network folder", capsys)


def test_a_head_of_another_trunk_is_refused_by_its_folder(folder, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    refused([f"model={other}", "output=out.json"], "but this trunk is", capsys)


def test_a_drafter_whose_head_is_not_there_is_refused(folder, tmp_path, capsys):
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("heads"))
    refused([f"model={plain}"], "drafter=sequential: the network has no sequential head", capsys)


def test_a_failure_of_ours_is_not_told_as_the_users(loaded, monkeypatch):
    monkeypatch.setattr(decode, "read_prompt", lambda network, prompt: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode.command(["prompt=x"])


def test_the_program_itself_in_a_terminal_that_knows_only_ascii(folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("世 🙂", encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [
            sys.executable, ROOT / "decode.py", f"model={folder}", f"prompt_file={tmp_path}/prompt.txt",
            "max_new_tokens=2", "output=out.json",
        ],
        env=environment, capture_output=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\\u4e16 \\U0001f642")
    assert json.loads(Path("out.json").read_text(encoding="utf-8"))["results"][0]["prompt"] == "世 🙂"


@pytest.mark.parametrize(
    ("dtype", "expected"), [("null", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_on_a_cpu_the_default_is_float32_whatever_the_folder_says(tiny, tmp_path, dtype, expected):
    tiny.save_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    settings = {"model": str(tmp_path / "half"), "heads": None, "device": "cpu"}
    settings |= {"packed": False, "compile": False}
    network = decode.load(settings | {"dtype": None if dtype == "null" else dtype})
    assert {parameter.dtype for parameter in network.parameters()} == {expected}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["packed=maybe"], "packed=maybe is not one of auto, true, false"),
        (["packed=1"], "packed=1 is not one of auto, true, false"),
        (["compile=maybe"], "compile=maybe is not one of auto, true, false"),
        (["compile=true", "packed=true"], "packed=true with compile=true: the kernel"),
        (["packed=true", "dtype=bfloat16"], "packed=true: weights are packed in float32 only"),
        (["compile=true", "dtype=bfloat16"], "compile=true: the kernel is for float32 on a CPU"),
    ],
)
def test_a_form_of_weights_that_cannot_be_is_told_in_one_line(folder, capsys, words, line):
    with pytest.raises(SystemExit) as ended:
        decode.command([f"model={folder}", "prompt_ids=[1,2]", *words])
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ([], "compiled"),
        (["packed=false"], "compiled"),
        (["packed=true"], "packed"),
        (["compile=true"], "compiled"),
        (["compile=false"], "packed"),
        (["compile=false", "packed=false"], "plain"),
    ],
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_every_form_of_weights_decodes_the_same(tiny, folder, words, form):
    keys = ["prompt_ids=[1,2]", "compare=true", "max_new_tokens=40", "output=out.json"]
    decode.command([f"model={folder}", *keys, *words])
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    expected = generate(tiny, [1, 2], max_new_tokens=40)[0].token_ids
    assert found["form"] == form
    assert [result["token_ids"] for result in found["results"]] == [expected]
    assert found["identical"]


def test_without_a_compiler_weights_are_packed_and_nothing_is_said(folder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    decode.command([f"model={folder}", "prompt_ids=[1,2]", "max_new_tokens=4", "output=out.json"])
    assert json.loads(Path("out.json").read_text(encoding="utf-8"))["form"] == "packed"
    Path("out.json").unlink()
    assert not capsys.readouterr().err
    refused([f"model={folder}", "compile=true"], "compile=true: there is no C++ compiler", capsys)


@pytest.mark.parametrize("path", DRAFTER_FILES, ids=lambda path: path.stem)
def test_a_drafter_yaml_names_its_module_and_has_the_defaults_of_its_signature(path):
    config = OmegaConf.to_container(OmegaConf.load(path))
    target = config.pop("_target_")
    assert target == f"decoding.drafters.{path.stem}.build"
    first, *parameters = inspect.signature(get_method(target)).parameters.values()
    assert first.name == "network"
    assert config == {parameter.name: parameter.default for parameter in parameters}


def test_every_drafter_has_a_yaml_and_every_yaml_a_drafter():
    modules = {path.stem for path in (ROOT / "decoding" / "drafters").glob("*.py")} - {"__init__"}
    assert {path.stem for path in DRAFTER_FILES} == modules


@pytest.mark.parametrize("path", DRAFTER_FILES, ids=lambda path: path.stem)
def test_every_drafter_is_built_by_its_name_and_decodes_as_plain_decoding_does(loaded, folder, path):
    needed = {"draft_model": [f"drafter.model={folder}"]}.get(path.stem, [])
    document = reported(f"drafter={path.stem}", *needed, "prompt=abab", "compare=true", "max_new_tokens=12")
    assert document["drafter"] == path.stem
    assert document["identical"] is True
