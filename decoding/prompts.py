"""Prompts as people write them (text, token ids, chat messages) -> token ids, checked."""

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

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
        check_unicode("prompt", prompt)
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


def check_unicode(key: str, text: str) -> None:
    """UserError for half a surrogate pair: what a byte that is no UTF-8 becomes on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} at character {error.start}"
        raise UserError(f"{key} is not Unicode text: {found}") from None


def need_tokenizer(tokenizer: Any, key: str) -> None:
    if tokenizer is None:
        raise UserError(f"{key}: this network has no tokenizer; give prompt_ids")


def is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def read_chat(tokenizer: Any, messages: Any) -> Prompt:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("messages: this network's tokenizer has no chat template; give prompt")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UserError(f"messages: {message!r} has no texts 'role' and 'content'")
        check_unicode("messages", message["content"])
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:  # a template may refuse, say, two user messages in a row
        raise UserError(f"messages: the chat template refuses them ({error})") from None
    return Prompt(tokenizer(text, add_special_tokens=False)["input_ids"], text)


def check_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, (list, tuple)):
        raise UserError(f"prompt_ids={ids!r} is not a list of token ids")
    if not ids:
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
