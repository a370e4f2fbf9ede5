"""Complete prompts: `python decode.py model=networks/pystdlib drafter=sequential compare=true`."""

import entry  # first: it sets up Hydra's environment

# isort: split
import dataclasses
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
from omegaconf import OmegaConf
from rich.console import Console

from decoding import Completion, generate
from decoding.generate import build_drafter, check_eos, check_verifier, drafter_names
from decoding.loop import VERIFIERS
from decoding.payoff import Ledger, ledger, shown
from decoding.prompts import read_prompt
from decoding.replay import Text
from decoding.report import document, identical, rate, speedup, summary
from decoding.requests import Request, read_requests
from decoding.terminal import Terminal
from decoding.trace import page
from decoding.tracer import Tracer
from mtp import Network, UserError, kernel

LITERAL = ("prompt", "stop")  # keys whose text Hydra's grammar would change or refuse
DTYPES = ("float32", "bfloat16", "float16")
WARM_UP_TOKENS = 8


def main(config: dict[str, Any], literal: dict[str, str]) -> None:
    """One call of decode.py, from the composed config and the values lifted from the command line."""
    if "stop" in literal:
        config["stop"] = literal["stop"]
    check_keys(config)
    drafter_name = config["drafter"]["_target_"].split(".")[-2]
    requests = read_requests(config, literal.get("prompt"))
    check_output("output", config["output"])
    check_output("trace", config["trace"])
    check_verifier(config["verifier"])
    transformers.utils.logging.disable_progress_bar()
    network = load(config)
    for request in requests:
        read_prompt(network, request.prompt)  # before anything is shown
    check_eos(network, config["eos_token_ids"])
    drafter = instantiate(config["drafter"], network=network)
    options = {key: config[key] for key in ("num_draft_tokens", "verifier", "eos_token_ids", "logprobs")}
    run = functools.partial(decode, network, requests, config["batch_size"], **options)
    book = None
    if config["ledger"]:
        book = foretold(network, requests, run(drafter="none"), drafter_name, config)
        Console().print(shown(book))
    if config["compare"]:
        # A drafter of its own: one that remembers earlier outputs would know the first prompt's.
        for warm in (instantiate(config["drafter"], network=network), "none"):
            decode(network, requests[:1], 1, **options, drafter=warm, limit=WARM_UP_TOKENS)
    terminal = Terminal(sys.stdout, stream=config["stream"] and config["batch_size"] == 1)
    tracer = Tracer(network.tokenizer) if config["trace"] else None
    completions = run(drafter=drafter, terminal=terminal, trace=tracer)
    lossless = VERIFIERS[config["verifier"]].lossless
    print(f"{drafter_name}: {summary(completions)}{'' if lossless else ', LOSSY: ' + config['verifier']}")
    plain = run(drafter="none") if config["compare"] else None
    same = config["verifier"] == "coupled" or all(r.sampling.temperature == 0 for r in requests)
    if plain is not None:
        print(compared(completions, plain, same))
    if tracer is not None:
        named = f"{drafter_name} on {config['model']}, verifier {config['verifier']}"
        write_text(config["trace"], page(tracer.stories, named))
    if config["output"]:
        settings = {key: config[key] for key in ("model", "verifier", "num_draft_tokens", "seed")}
        settings["form"] = network.form
        settings["ledger"] = book and [dataclasses.asdict(line) for line in book.entries]
        write(
            config["output"],
            document(completions, plain, same, drafter=drafter_name, lossless=lossless, **settings),
        )


def check_keys(config: dict[str, Any]) -> None:
    """Refuse a key that Hydra was made to add or to drop."""
    known = {"drafter", *OmegaConf.load(entry.CONF / "decode.yaml")} - {"defaults"}
    for key in sorted(set(config) - known):
        raise UserError(f"unknown key {key}: see --cfg job for the keys that there are")
    for key in sorted(known - set(config)):
        raise UserError(f"{key} is missing: say {key}=…")


def check_drafter(arguments: list[str]) -> None:
    """End where Hydra would take the drafter for several or for none; a multirun may name several."""
    names = sorted(path.stem for path in (entry.CONF / "drafter").glob("*.yaml"))
    for argument in arguments:
        key, sign, value = argument.partition("=")
        if key == "drafter" and value.startswith("["):
            entry.fail(f"{argument}: one drafter is needed, not a list")
        if key == "drafter" and sign and value not in names and not {"-m", "--multirun"} & set(arguments):
            entry.fail(f"{argument} is not one of {', '.join(names)}")


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
    check_form(config)
    network = Network.from_pretrained(
        config["model"], heads=config["heads"], dtype=dtype and getattr(torch, dtype), device=device
    )
    shape(network, config)
    return network


def check_form(config: dict[str, Any]) -> None:
    """Refuse values of packed and compile that are none, or that contradict each other."""
    for key in ("packed", "compile"):
        if not isinstance(config[key], bool) and config[key] != "auto":
            raise UserError(f"{key}={config[key]} is not one of auto, true, false")
    if config["compile"] is True and config["packed"] is True:
        raise UserError(
            "packed=true with compile=true: the kernel reads weights as they lie; say one of the two"
        )


def shape(network: Network, config: dict[str, Any]) -> None:
    """Compile or pack the network as the config says; what was asked for by name must be possible."""
    wanted = config["compile"] is True or (config["compile"] and config["packed"] is not True)
    if wanted and (reason := compiled(network, config["compile"] is True)) is None:
        return
    if config["compile"] is True:
        raise UserError(f"compile=true: {reason}")
    if config["packed"] and (reason := network.pack()) and config["packed"] is True:
        raise UserError(f"packed=true: {reason}")


def compiled(network: Network, asked: bool) -> str | None:
    """Put the kernel in, saying so where it is built first; on a GPU, where it was asked for, compile and
    capture graphs instead, saying how far that is. The reason where neither can be."""
    trunk = network.trunk
    if asked and trunk.device.type == "cuda":
        return network.capture_graphs(Console(stderr=True, highlight=False).print)
    if kernel.why_not(trunk.device, trunk.dtype, trunk.config) or kernel.path().is_file():
        return network.compile_kernel()
    with Console(stderr=True).status("building the kernel for this machine (seconds, once)"):
        return network.compile_kernel()


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


def foretold(
    network: Network, requests: list[Request], plain: list[Completion], chosen: str, config: dict[str, Any]
) -> Ledger:
    """The ledger of every drafter that this network can have, on what plain decoding made of the requests."""
    drafters = {name: functools.partial(build_drafter, network, name) for name in drafter_names()}
    drafters[chosen] = functools.partial(instantiate, config["drafter"], network=network)
    del drafters["none"]
    texts = [
        Text(completion.prompt_ids, completion.token_ids, request.sampling, request.max_new_tokens)
        for completion, request in zip(plain, requests, strict=True)
    ]
    eos = check_eos(network, config["eos_token_ids"])
    return ledger(network, texts, drafters, batch_size=config["batch_size"], eos_token_ids=eos)


def compared(completions: list[Completion], plain: list[Completion], same: bool) -> str:
    line = f"plain: {rate(plain):.1f} tokens/s; speedup {speedup(completions, plain) or 0:.2f}"
    if not same:
        return f"{line}; sampled, so only the law is the same"
    return f"{line}; {'identical' if identical(completions, plain) else 'NOT IDENTICAL'}"


def check_output(key: str, path: object) -> None:
    """Refuse a file that could not be written, before anything is decoded."""
    if path is None:
        return
    if not isinstance(path, str) or not path:
        raise UserError(f"{key}={path!r} is not a file name")
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"{key}={path}: there is no folder {Path(path).parent}")
    if Path(path).is_dir():
        raise UserError(f"{key}={path} is a folder; a file is needed")


def write(path: str, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1))


def write_text(path: str, text: str) -> None:
    """The file, whole or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", dir=Path(path).absolute().parent, delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
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


def command(argv: list[str]) -> None:
    """The whole command line, `argv` without the program's name."""
    rest, literal = lift(argv)
    check_drafter(rest)
    entry.run(functools.partial(main, literal=literal), "decode", rest)


if __name__ == "__main__":
    command(sys.argv[1:])
