"""Complete prompts: `python decode.py model=networks/pystdlib drafter=sequential compare=true`."""

import entry  # first: it sets up Hydra's environment

# isort: split
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.utils import instantiate

from decoding import Completion, generate
from decoding.generate import VERIFIERS
from decoding.prompts import read_prompt
from decoding.report import document, identical, rate, speedup, summary
from decoding.requests import Request, read_requests
from decoding.terminal import Terminal
from mtp import Network, UserError

LITERAL = ("prompt", "stop")  # keys whose text Hydra's grammar would change or refuse
DTYPES = ("float32", "bfloat16", "float16")
WARM_UP_TOKENS = 8


def main(config: dict[str, Any], literal: dict[str, str]) -> None:
    """One call of decode.py, from the composed config and the values lifted from the command line."""
    if "stop" in literal:
        config["stop"] = literal["stop"]
    drafter_name = config["drafter"]["_target_"].split(".")[-2]
    requests = read_requests(config, literal.get("prompt"))
    check_output(config["output"])
    transformers.utils.logging.disable_progress_bar()
    network = load(config)
    for request in requests:
        read_prompt(network, request.prompt)  # before anything is shown
    drafter = instantiate(config["drafter"], network=network)
    options = {key: config[key] for key in ("num_draft_tokens", "verifier", "eos_token_ids", "logprobs")}
    run = functools.partial(decode, network, requests, config["batch_size"], **options)
    if config["compare"]:
        for warm in (drafter, "none"):
            decode(network, requests[:1], 1, **options, drafter=warm, limit=WARM_UP_TOKENS)
    terminal = Terminal(sys.stdout, stream=config["stream"] and config["batch_size"] == 1)
    completions = run(drafter=drafter, terminal=terminal)
    lossless = VERIFIERS[config["verifier"]].lossless
    print(f"{drafter_name}: {summary(completions)}{'' if lossless else ', LOSSY: ' + config['verifier']}")
    plain = run(drafter="none") if config["compare"] else None
    same = config["verifier"] == "coupled" or all(r.sampling.temperature == 0 for r in requests)
    if plain is not None:
        print(compared(completions, plain, same))
    if config["output"]:
        settings = {key: config[key] for key in ("model", "verifier", "num_draft_tokens", "seed")}
        write(
            config["output"],
            document(completions, plain, same, drafter=drafter_name, lossless=lossless, **settings),
        )


def load(config: dict[str, Any]) -> Network:
    """The network, in float32 on a CPU whatever the folder says, in the folder's dtype on a GPU."""
    dtype, device = config["dtype"], config["device"]
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of {', '.join(DTYPES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={device} cannot be used here ({str(error).splitlines()[0]})") from None
    if dtype is None and kind == "cpu":
        dtype = "float32"
    return Network.from_pretrained(
        config["model"], heads=config["heads"], dtype=dtype and getattr(torch, dtype), device=device
    )


def decode(
    network: Network,
    requests: list[Request],
    batch_size: int,
    *,
    terminal: Terminal | None = None,
    limit: int | None = None,
    **options: Any,
) -> list[Completion]:
    """All requests, batch_size at a time; `limit` cuts their lengths (to warm up)."""
    completions: list[Completion] = []
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        lengths = [request.max_new_tokens for request in batch]
        if terminal:
            terminal.begin(batch[0].prompt, network.tokenizer)
        done = generate(
            network,
            [request.prompt for request in batch],
            sampling=[request.sampling for request in batch],
            seed=[request.seed for request in batch],
            stop=[request.stop for request in batch],
            max_new_tokens=lengths if limit is None else [min(limit, length) for length in lengths],
            observe=terminal.show if terminal and terminal.stream else None,
            **options,
        )
        if terminal:
            terminal.end(done)
        completions += done
    return completions


def compared(completions: list[Completion], plain: list[Completion], same: bool) -> str:
    line = f"plain: {rate(plain):.1f} tokens/s; speedup {speedup(completions, plain) or 0:.2f}"
    if not same:
        return f"{line}; sampled, so only the law is the same"
    return f"{line}; {'identical' if identical(completions, plain) else 'NOT IDENTICAL'}"


def check_output(output: str | None) -> None:
    if output and not Path(output).absolute().parent.is_dir():
        raise UserError(f"output={output}: there is no folder {Path(output).parent}")
    if output and Path(output).is_dir():
        raise UserError(f"output={output} is a folder; a file is needed")


def write(path: str, value: dict[str, Any]) -> None:
    """The JSON file, whole or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", dir=Path(path).absolute().parent, delete=False, encoding="utf-8"
    ) as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def lift(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Take literal values from the command line before Hydra reads it; a list, or a multirun, is left to
    Hydra.

    >>> lift(["prompt=x = [1, 2]", "seed=1"])
    (['seed=1'], {'prompt': 'x = [1, 2]'})
    """
    if {"-m", "--multirun"} & set(argv):
        return argv, {}
    literal, rest = {}, []
    for argument in argv:
        key, sign, value = argument.partition("=")
        if sign and key in LITERAL and not (key == "stop" and value.startswith("[")):
            literal[key] = value
        else:
            rest.append(argument)
    return rest, literal


if __name__ == "__main__":
    rest, literal = lift(sys.argv[1:])
    for argument in rest:
        if argument.startswith("drafter=["):
            entry.fail(f"{argument}: one drafter is needed, not a list")
    entry.run(functools.partial(main, literal=literal), "decode", rest)
