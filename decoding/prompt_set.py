"""Prompts by category, from a .jsonl file: a line is {"category": …, "messages": […]} or {…, "prompt": …}.

A network without a chat template takes of messages the last one's text, as it stands.
"""

from dataclasses import dataclass
from typing import Any

from decoding.prompts import PromptLike, read_prompt
from decoding.requests import read_prompt_file
from mtp import Network, UserError


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a set."""

    category: str
    prompt: PromptLike


def read_items(path: str) -> list[Item]:
    """All lines of one file; UserError where one has no category."""
    if not path.endswith(".jsonl"):
        raise UserError(f"prompts: {path} is not a .jsonl file")
    return [
        item(line, f"prompts: {path}, prompt {row},") for row, line in enumerate(read_prompt_file(path), 1)
    ]


def item(line: dict[str, Any], where: str) -> Item:
    category = line.get("category")
    if not isinstance(category, str) or not category:
        raise UserError(f"{where} has no category")
    return Item(category, next(line[key] for key in ("prompt", "messages", "prompt_ids") if key in line))


def prompt_ids(network: Network, prompt: PromptLike) -> list[int]:
    """Token ids; see above for a network without a chat template."""
    if is_messages(prompt) and not getattr(network.tokenizer, "chat_template", None):
        prompt = prompt[-1]["content"]  # type: ignore[index]
    return read_prompt(network, prompt).ids


def is_messages(prompt: PromptLike) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict) and isinstance(prompt[-1], dict)
