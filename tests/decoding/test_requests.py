"""From a config and a prompt file to checked requests."""

import io
import json
import math
import sys

import hydra
import pytest

import entry
from decoding import Sampling
from decoding.requests import read_requests
from mtp import UserError


@pytest.fixture(scope="module")
def config():
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        return entry.plain(hydra.compose("decode"))


def written(tmp_path, *lines, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_without_a_prompt_the_built_in_one_is_decoded(config):
    (request,) = read_requests(config, None)
    assert request.prompt == config["prompt"]
    assert (request.sampling, request.seed, request.max_new_tokens) == (Sampling(), 0, 128)


@pytest.mark.parametrize("text", ["x", " ", "\n", "null", "1e3", "\ufeffx", "a\r\nb", "\u2028", "x" * 5000])
def test_a_prompt_file_is_one_prompt_to_the_last_byte(config, tmp_path, text):
    path = tmp_path / "prompt.txt"
    path.write_bytes(text.encode())
    assert read_requests(config | {"prompt_file": str(path)}, None)[0].prompt == text


def test_every_line_of_a_jsonl_file_is_a_request_with_settings_of_its_own(config, tmp_path):
    path = written(
        tmp_path,
        {"prompt": "a\u2028b"},
        "",
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "stop": "x"},
        {"prompt_ids": [1, 2], "seed": 77, "max_new_tokens": 3, "top_k": 4, "top_p": 0.5},
        {"prompt": "z", "stop": ["y", "zz"], "bad_words": ["w"], "min_p": 0.1, "repetition_penalty": 1.5},
    )
    rows = read_requests(
        config | {"prompt_file": path, "seed": 10, "temperature": 1.0, "stop": ["END"]}, None
    )
    assert [row.prompt for row in rows] == [
        "a\u2028b", [{"role": "user", "content": "hi"}], [1, 2], "z",
    ]  # fmt: skip
    assert [row.seed for row in rows] == [10, 11, 77, 13]  # row r has seed + r
    assert [row.max_new_tokens for row in rows] == [128, 128, 3, 128]
    assert [row.stop for row in rows] == [["END"], ["x"], ["END"], ["y", "zz"]]
    assert rows[0].sampling == Sampling(temperature=1.0)
    assert rows[1].sampling == Sampling(temperature=0.5)
    assert rows[2].sampling == Sampling(temperature=1.0, top_k=4, top_p=0.5)
    assert rows[3].sampling == Sampling(temperature=1.0, bad_words=("w",), min_p=0.1, repetition_penalty=1.5)


def test_standard_input_is_read_as_a_file_is(config, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\r\n\n".encode())))
    assert read_requests(config | {"prompt_file": "-"}, None)[0].prompt == "é\r\n\n"


@pytest.mark.parametrize(
    ("changes", "prompt", "told"),
    [
        ({}, "", "prompt is empty"),
        ({"prompt": 5}, None, "prompt=5 is not a text"),
        ({"prompt": True}, None, "prompt=True is not a text"),
        ({"prompt_ids": []}, None, "prompt_ids is empty"),
        ({"prompt_ids": 5}, None, "prompt_ids=5 is not a list"),
        ({"prompt_ids": "1,2"}, None, "prompt_ids='1,2' is not a list"),
        ({"prompt_ids": [1, -1]}, None, "prompt_ids: -1"),
        ({"prompt_ids": [1, True]}, None, "prompt_ids: True"),
        ({"prompt_ids": [1, "a"]}, None, "prompt_ids: 'a'"),
        ({"prompt_ids": [1]}, "x", "prompt_ids and prompt are both given"),
        ({"prompt_ids": [1], "prompt_file": "x"}, None, "prompt_file and prompt_ids are both given"),
        ({"prompt_file": 5}, None, "prompt_file=5 is not a text; quote it"),
        ({"prompt_file": "no/such/file"}, None, "prompt_file=no/such/file cannot be read"),
        ({"prompt_file": "."}, None, "prompt_file=. cannot be read"),
        ({"batch_size": 0}, None, "batch_size=0"),
        ({"batch_size": 1.0}, None, "batch_size=1.0"),
        ({"num_draft_tokens": -1}, None, "num_draft_tokens=-1 is not a whole number of at least 0"),
        ({"num_draft_tokens": 4.0}, None, "num_draft_tokens=4.0"),
        ({"num_draft_tokens": "abc"}, None, "num_draft_tokens='abc'"),
        ({"num_draft_tokens": True}, None, "num_draft_tokens=True"),
        ({"max_new_tokens": -1}, None, "max_new_tokens=-1"),
        ({"seed": 1.5}, None, "seed=1.5"),
        ({"seed": 2**63}, None, "seed=9223372036854775808"),
        ({"seed": -(2**63)}, None, "seed=-9223372036854775808"),
        ({"temperature": math.nan}, None, "temperature=nan is not a finite number of at least 0"),
        ({"temperature": math.inf}, None, "temperature=inf"),
        ({"temperature": -1}, None, "temperature=-1"),
        ({"temperature": "hot"}, None, "temperature=hot"),
        ({"top_p": 0}, None, "top_p=0 is not a finite number above 0 and at most 1"),
        ({"top_p": 1.5}, None, "top_p=1.5"),
        ({"top_k": -1}, None, "top_k=-1"),
        ({"stop": [None]}, None, "stop: None is not a text"),
        ({"stop": [11]}, None, "stop: 11 is not a text"),
        ({"stop": [""]}, None, "stop: '' is not a text"),
        ({"stop": 11}, None, "stop: 11 is not a text"),
        ({"bad_words": [True]}, None, "bad_words: True is not a text"),
        ({"model": 5}, None, "model=5 is not a text"),
        ({"model": None}, None, "model=None is not a text"),
        ({"output": 5}, None, "output=5 is not a text"),
        ({"heads": False}, None, "heads=False is not a text"),
        ({"verifier": ["token"]}, None, r"verifier=\['token'\] is not a text"),
        ({"device": None}, None, "device=None is not a text"),
        ({"dtype": 16}, None, "dtype=16 is not a text"),
        ({"compare": "maybe"}, None, "compare='maybe' is neither true nor false"),
        ({"stream": 1}, None, "stream=1 is neither true nor false"),
        ({"logprobs": None}, None, "logprobs=None is neither true nor false"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_by_its_key(config, changes, prompt, told):
    with pytest.raises(UserError, match=told) as error:
        read_requests(config | changes, prompt)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ("5", "line 2 is not an object"),
        ({}, "line 2 needs exactly one of"),
        ({"prompt": "a", "prompt_ids": [1]}, "line 2 needs exactly one of"),
        ({"prompt": "a", "temprature": 1}, "line 2: unknown key 'temprature'; the keys are prompt,"),
        ({"prompt": 5}, "line 2: prompt is 5, not a text"),
        ({"prompt": None}, "line 2: prompt is None, not a text"),
        ({"messages": "hello"}, "line 2: messages is 'hello', not a list of objects"),
        ({"messages": []}, r"line 2: messages is \[\], not a list of objects"),
        ({"messages": [1, 2]}, r"line 2: messages is \[1, 2\], not a list of objects"),
        ({"messages": {"role": "user"}}, "line 2: messages is {'role': 'user'}, not a list"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [{"role": "user"}]}, "prompt_ids: {'role': 'user'}"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "seed": "x"}, "seed='x'"),
        ({"prompt": "a", "max_new_tokens": -2}, "max_new_tokens=-2"),
        ({"prompt": "a", "stop": ["", "x"]}, "stop: ''"),
        ('{"prompt": "a", "temperature": NaN}', "temperature=nan"),
    ],
)
def test_a_broken_line_is_told_by_its_number_or_its_key(config, tmp_path, line, told):
    path = written(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(UserError, match=told):
        read_requests(config | {"prompt_file": path}, None)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_prompt_file_without_a_prompt_is_refused_by_name(config, tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"prompts\.jsonl is empty"):
        read_requests(config | {"prompt_file": str(path)}, None)


def test_an_empty_prompt_file_is_refused_by_name(config, tmp_path):
    (tmp_path / "prompt.txt").write_text("")
    with pytest.raises(UserError, match=r"prompt\.txt is empty"):
        read_requests(config | {"prompt_file": str(tmp_path / "prompt.txt")}, None)


def test_a_prompt_file_that_is_no_utf8_is_refused_with_the_place(config, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"ab\xffc")
    with pytest.raises(UserError, match=r"prompt\.txt is not UTF-8 text \(byte 2\)"):
        read_requests(config | {"prompt_file": str(tmp_path / "prompt.txt")}, None)
