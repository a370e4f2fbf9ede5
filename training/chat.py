"""Conversations as tokens, and which of them the assistant says: the only ones that are learned."""

from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from mtp.errors import UserError
from training.text import Message


def encode(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N] int32 of the whole conversation, and [N] bool: those of the assistant's turns.

    A template made for training marks them. Otherwise a turn begins behind what the template puts before an
    answer and ends with what closes it; the first message answers nothing and is not learned. UserError (with
    `name`, the document's) where there is no template or its text does not show the turns.
    """
    text = render(messages, tokenizer, name)
    if "generation %}" in str(tokenizer.chat_template):
        return marked(messages, tokenizer)
    spans = [
        turn(messages, number, tokenizer, name)
        for number, message in enumerate(messages)
        if number and message["role"] == "assistant"
    ]
    for start, stop, upto in spans:
        if not text.startswith(upto) or stop < start:
            raise UserError(
                f"{name}: the chat template changes earlier turns when the conversation goes on, "
                f"so the assistant's cannot be told; split it into conversations with one answer each"
            )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(encoding["input_ids"], np.int32)
    learned = np.zeros(len(ids), bool)
    offsets = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    for start, stop, _ in spans:
        learned |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0])
    return ids, learned


def marked(messages: Sequence[Message], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)


def turn(
    messages: Sequence[Message], number: int, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[int, int, str]:
    """Where the assistant's message `number` begins and ends in the text, and the text up to there.

    With the template `<role>content|` the turn of [user Hi, assistant Yo] is `Yo|`: the text before it,
    `<user>Hi|<assistant>`, is what is rendered when an answer is asked for.
    """
    upto = render(messages[: number + 1], tokenizer, name)
    before = render(messages[:number], tokenizer, name, ask=True)
    if not upto.startswith(before):
        before = render(messages[:number], tokenizer, name)
    return (len(before) if upto.startswith(before) else len(upto) + 1), len(upto), upto


def render(messages: Sequence[Message], tokenizer: Any, name: str, *, ask: bool = False) -> str:
    """The text that the template makes of the messages; `ask` adds what comes before an answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{name} is a conversation, but the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except jinja2.exceptions.TemplateError as error:
        raise UserError(f"{name} does not fit the chat template: {error}") from error
