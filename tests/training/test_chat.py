import json

import numpy as np
import pytest
from tiny import byte_tokenizer

from mtp import UserError
from training.chat import encode
from training.files import Files
from training.packing import Rows, tokenize
from training.text import Document

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "|{% endfor %}"
)
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye <assistant>"},
    {"role": "assistant", "content": "See you"},
]


def tokenizer(template: str | None = TEMPLATE):
    made = byte_tokenizer()
    made.chat_template = template
    return made


def learned_text(template: str, messages=TALK) -> list[str]:
    ids, learned = encode(messages, tokenizer(template), "talk")
    text = bytes(token - 2 for token in ids.tolist()).decode()
    marks = "".join(letter if flag else "\0" for letter, flag in zip(text, learned, strict=True))
    return [part for part in marks.split("\0") if part]


def test_only_what_the_assistant_says_is_learned_with_the_token_that_ends_it():
    assert learned_text(TEMPLATE) == ["Yo|", "See you|"]


def test_a_template_that_marks_the_turns_is_believed():
    assert learned_text(MARKED) == ["Yo", "See you"]


def test_a_first_message_of_the_assistant_answers_nothing():
    assert learned_text(TEMPLATE, TALK[1:]) == ["See you|"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    rewriting = "{{ messages|length }}" + TEMPLATE
    with pytest.raises(UserError, match="talk: the chat template changes earlier turns"):
        encode(TALK, tokenizer(rewriting), "talk")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="talk is a conversation, but the tokenizer has no chat template"):
        encode(TALK, tokenizer(None), "talk")


def test_rows_of_conversations_mask_everything_else(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[:2]}) + "\n")
    documents = Files(str(path), field="messages").documents()
    rows = Rows(tokenize([*documents, Document("plain", "ab")], tokenizer()), 16)
    ids = np.concatenate([rows[row]["tokens"] for row in range(len(rows))])
    mask = np.concatenate([rows[row]["mask"] for row in range(len(rows))])
    assert bytes(int(token) - 2 for token in ids[mask] if token > 1) == b"Yo|See you|Yo|ab"
    assert rows.trainable() == mask.sum() - 1  # the plain text's first token follows nothing


def test_conversations_without_an_answer_are_refused_because_nothing_is_learned():
    documents = [Document("talk", "Hi", messages=TALK[:1])]
    with pytest.raises(UserError, match="0 of them to be learned"):
        Rows(tokenize(documents, tokenizer()), 16)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "user"}], "must have role and content"),
        ([3], "found int"),
        ([{"role": "user", "content": 1}], "content"),
    ],
)
def test_a_broken_conversation_is_told_by_file_line_and_message(tmp_path, messages, told):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(UserError, match=rf"talks.jsonl line 1, field 'messages', message 0.*{told}"):
        Files(str(path), field="messages").documents()
