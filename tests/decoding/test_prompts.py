"""Prompts against a network: its tokenizer, its vocabulary, its context."""

import pytest
from tiny import byte_tokenizer

from decoding.prompts import read_prompt
from mtp import Network, UserError


def with_tokenizer(network, template=None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Network(network.trunk, tokenizer=tokenizer)


@pytest.mark.parametrize("text", ["\udcff", "a\ud800b"])
def test_half_a_surrogate_pair_is_refused(network, text):
    with pytest.raises(UserError, match=r"prompt is not Unicode text: .* at character"):
        read_prompt(with_tokenizer(network), text)


def test_ids_outside_the_vocabulary_are_refused_with_its_size(network):
    for ids in ([64], [-1], [0, 1.0]):
        with pytest.raises(UserError, match="is not a whole number from 0 to 63"):
            read_prompt(network, ids)


def test_the_context_must_leave_room_for_one_token(network):
    assert len(read_prompt(network, [1] * 255).ids) == 255
    with pytest.raises(UserError, match="prompt has 256 tokens, but the context holds 256"):
        read_prompt(network, [1] * 256)


def test_messages_go_through_the_chat_template(network):
    chatty = with_tokenizer(network, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    prompt = read_prompt(chatty, [{"role": "user", "content": "<s>é"}])
    assert prompt.text == "user: <s>é\n"
    assert prompt.ids == [byte + 2 for byte in prompt.text.encode()]


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"content": "x"}, {"role": 1, "content": "x"}, {"role": "user", "content": None}],
)
def test_a_message_needs_two_texts(network, message):
    with pytest.raises(UserError, match="has no texts 'role' and 'content'"):
        read_prompt(with_tokenizer(network, "x"), [message])


def test_a_template_that_refuses_the_messages_is_quoted(network):
    strict = with_tokenizer(network, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"the chat template refuses them \(roles must"):
        read_prompt(strict, [{"role": "user", "content": "x"}])


def test_messages_without_a_template_and_text_without_a_tokenizer_are_refused(network):
    with pytest.raises(UserError, match="no chat template"):
        read_prompt(with_tokenizer(network), [{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="messages: this network has no tokenizer"):
        read_prompt(network, [{"role": "user", "content": "x"}])
