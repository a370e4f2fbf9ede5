"""What to decode and how, from a config and a prompt file: one Request a prompt, everything checked."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.noise import SEEDS
from decoding.prompts import PromptLike, check_ids
from decoding.sampling import Sampling
from mtp import UserError
from mtp.errors import check_whole

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")
OF_A_LINE = (
    "prompt", "messages", "prompt_ids", "category", "seed", "max_new_tokens", "stop", "bad_words", *NUMBERS
)  # fmt: skip
TEXTS = ("model", "verifier", "device")
TEXTS_OR_NOTHING = ("heads", "prompt_file", "dtype", "output")
SWITCHES = ("stream", "logprobs", "compare")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its own settings."""

    prompt: PromptLike
    sampling: Sampling
    seed: int
    max_new_tokens: int
    stop: list[str]


def read_requests(config: dict[str, Any], prompt: str | None) -> list[Request]:
    """The requests of one call: `prompt` is what the command line said, None if nothing.

    At most one of prompt, prompt_file and prompt_ids may be given; none means the config's built-in prompt.
    """
    check_kinds(config)
    check_whole("batch_size", config["batch_size"], 1)
    if config["num_draft_tokens"] != "auto":
        check_whole("num_draft_tokens", config["num_draft_tokens"], 0)
    given = [key for key in ("prompt_file", "prompt_ids") if config[key] is not None]
    if prompt is not None:
        given.append("prompt")
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} are both given; only one can be decoded")
    lines: list[dict[str, Any]]
    if "prompt_file" in given:
        lines = read_prompt_file(config["prompt_file"])
    elif "prompt_ids" in given:
        lines = [{"prompt_ids": config["prompt_ids"]}]
    else:
        lines = [{"prompt": config["prompt"] if prompt is None else prompt}]
    return [request(line, config, row) for row, line in enumerate(lines)]


def request(line: dict[str, Any], config: dict[str, Any], row: int) -> Request:
    """One line's request; what it does not say comes from the config, and row r has seed + r."""
    numbers = {key: line.get(key, config[key]) for key in NUMBERS}
    words, stop = (strings(key, line.get(key, config[key])) for key in ("bad_words", "stop"))
    sampling = Sampling(**numbers, bad_words=tuple(words))
    seed = line.get("seed", config["seed"])
    check_whole("seed", seed, -SEEDS, SEEDS)
    length = line.get("max_new_tokens", config["max_new_tokens"])
    check_whole("max_new_tokens", length, 0)
    prompt = next(line[key] for key in ("prompt", "messages", "prompt_ids") if key in line)
    if "prompt_ids" in line:
        prompt = check_ids(prompt, SEEDS)  # against the vocabulary once the network is there
    elif not prompt:
        raise UserError("prompt is empty; at least one character is needed")
    elif "prompt" in line:
        check_text("prompt", prompt)
    return Request(prompt, sampling, seed if "seed" in line else seed + row, length, stop)


def read_prompt_file(path: str) -> list[dict[str, Any]]:
    """A text file (or standard input, "-") is one prompt, byte for byte; .jsonl has one a line."""
    check_text("prompt_file", path)
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise UserError(f"prompt_file={path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_file={path} is not UTF-8 text (byte {error.start})") from None
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not text or (path.endswith(".jsonl") and not lines):
        raise UserError(f"prompt_file={path} is empty; at least one character is needed")
    if not path.endswith(".jsonl"):
        return [{"prompt": text}]
    return [read_line(path, number, line) for number, line in lines]


def read_line(path: str, number: int, line: str) -> dict[str, Any]:
    where = f"prompt_file={path} line {number}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is not an object")
    if unknown := sorted(set(value) - set(OF_A_LINE)):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(OF_A_LINE)}")
    if len({"prompt", "messages", "prompt_ids"} & set(value)) != 1:
        raise UserError(f"{where} needs exactly one of prompt, messages and prompt_ids")
    if "prompt" in value and not isinstance(value["prompt"], str):
        raise UserError(f"{where}: prompt is {value['prompt']!r}, not a text")
    messages = value.get("messages", [{}])
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise UserError(f"{where}: messages is {messages!r}, not a list of objects with role and content")
    return value


def check_kinds(config: dict[str, Any]) -> None:
    """Texts are texts and switches are true or false: Hydra makes what it likes of an unquoted value."""
    for key in (*TEXTS, *(key for key in TEXTS_OR_NOTHING if config[key] is not None)):
        check_text(key, config[key])
    for key in SWITCHES:
        if not isinstance(config[key], bool):
            raise UserError(f"{key}={config[key]!r} is neither true nor false")


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name}={value!r} is not a text; quote it: {name}='\"{value}\"'")


def strings(name: str, value: object) -> list[str]:
    """A text or a list of texts as a list: Hydra makes numbers, null and booleans of some, which never
    match."""
    items: list[Any] = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, str) or not item:
            raise UserError(
                f"{name}: {item!r} is not a text of at least one character; quote it: {name}=['\"…\"']"
            )
    return items
