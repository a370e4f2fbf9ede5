"""A byte-level BPE tokenizer for trunks trained from scratch: every text survives encoding and decoding."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mtp.errors import UserError
from training.cache import cached, digest

BEGIN, END = "<s>", "</s>"  # ids 0 and 1
SMALLEST = 256 + 2  # every byte, and the two special tokens
LONGEST_WORD = 1000  # characters of one run that the trainer looks at

# The runs that the pre-tokenizer keeps whole: letters, digits, white space, the rest.
_LONG_RUN = re.compile(
    "|".join(rf"({kind}{{{LONGEST_WORD}}}){kind}+" for kind in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)"))
)


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, *, cache_dir: str | None = None
) -> PreTrainedTokenizerFast:
    """Train on these texts, the same way every time. Few texts may yield fewer than `vocab_size` symbols."""
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < SMALLEST:
        raise UserError(
            f"vocab_size must be an integer of at least {SMALLEST} (all bytes, {BEGIN}, {END}), "
            f"found {vocab_size!r}"
        )

    def compute() -> dict[str, np.ndarray]:
        return {"json": np.frombuffer(_train(texts, vocab_size).to_str().encode(), np.uint8)}

    stored = cached(cache_dir, digest("tokenizer", tokenizers.__version__, str(vocab_size), *texts), compute)
    return wrap(Tokenizer.from_str(stored["json"].tobytes().decode()))


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """As transformers knows it. `<s>` spelt out in a text stays text: special tokens are put, never read."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _train(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_shortened(texts), trainer, length=len(texts))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer


def _shortened(texts: Sequence[str]) -> Iterator[str]:
    """Texts with endless runs cut.

    A merge costs time in proportion to the length of a word: one of 30 MB would take days and teach nothing.
    """
    for text in texts:
        long_line = any(len(line) > LONGEST_WORD for line in text.split("\n"))
        yield _LONG_RUN.sub(_beginning, text) if long_line or "\n" * LONGEST_WORD in text else text


def _beginning(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)
