"""Prompts as people write them (text, token ids, chat messages) -> token ids, checked."""

from dataclasses import dataclass
from typing import Any

from mtp import Network, UserError

Message = dict[str, str]
PromptLike = str | list[int] | list[Message]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids and, where there is a tokenizer, its text."""

    ids: list[int]
    text: str | None


def read_prompt(network: Network, prompt: PromptLike) -> Prompt:
    """UserError where it is empty, too long for the context, not of this vocabulary, or needs a tokenizer we
    lack."""
    tokenizer = network.tokenizer
    if isinstance(prompt, str):
        need_tokenizer(tokenizer, "prompt")
        if not prompt:
            raise UserError("prompt is empty; at least one character is needed")
        result = Prompt(tokenizer(prompt)["input_ids"], prompt)
    elif is_chat(prompt):
        need_tokenizer(tokenizer, "messages")
        result = read_chat(tokenizer, prompt)
    else:
        ids = check_ids(prompt, network.trunk.vocab_size)
        result = Prompt(ids, tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else None)
    check_length(len(result.ids), network.trunk.context)
    return result


def need_tokenizer(tokenizer: Any, key: str) -> None:
    if tokenizer is None:
        raise UserError(f"{key}: this network has no tokenizer; give prompt_ids")


def is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def read_chat(tokenizer: Any, messages: Any) -> Prompt:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("messages: this network's tokenizer has no chat template; give prompt")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise UserError(f"messages: {message!r} has no 'role' and 'content'")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(tokenizer(text, add_special_tokens=False)["input_ids"], text)


def check_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, (list, tuple)) or not ids:
        raise UserError("prompt_ids is empty; at least one token id is needed")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UserError(f"prompt_ids: {token!r} is not a whole number from 0 to {vocab_size - 1}")
    return list(ids)


def check_length(length: int, context: int) -> None:
    if length == 0:
        raise UserError("prompt has no token; at least one is needed")
    if length >= context:
        raise UserError(
            f"prompt has {length} tokens, but the context holds {context} and must leave room for one more"
        )
