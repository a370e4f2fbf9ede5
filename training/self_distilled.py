"""Training text that the frozen trunk writes itself, from prompts of the training split.

A drafter is asked about the trunk's own text when it drafts, so that is what it learns from best (FastMTP,
arXiv 2509.18362; DistillSpec, arXiv 2310.08461). Written once: one line of JSON for each prompt, so that a
run that was stopped goes on behind the last whole line.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mtp.errors import UserError, check_whole
from training.cache import cache_folder, digest, locked
from training.progress import shown, tell
from training.prompts import Prompt, prompts
from training.text import Document

# (prompts' token ids, a seed for each, temperature, most new tokens) -> the new token ids of each
ContinueText = Callable[[list[list[int]], list[int], float, int], list[list[int]]]


@dataclass(frozen=True)
class SelfDistilled:
    """`prompts` beginnings of `prompt_tokens` tokens, each continued by up to `new_tokens`.

    temperature 0 is greedy; prompt r is continued with seed + r. `learn_prompt` makes the prompts' own tokens
    targets too. `batch_size` prompts are continued together, which changes nothing but the time.
    """

    prompts: int = 1000
    prompt_tokens: int = 32
    new_tokens: int = 224
    temperature: float = 1.0
    seed: int = 0
    learn_prompt: bool = False
    batch_size: int = 32

    def __post_init__(self) -> None:
        for key in ("prompts", "prompt_tokens", "new_tokens", "batch_size"):
            check_whole(f"data.self_distilled.{key}", getattr(self, key), 1)
        check_whole("data.self_distilled.seed", self.seed, 0)
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"data.self_distilled.temperature={self.temperature} is not a number from 0 on")

    def documents(
        self,
        documents: Sequence[Document],
        tokenizer: PreTrainedTokenizerBase,
        continue_text: ContinueText,
        fingerprint: str,
        *,
        cache_dir: str | None = None,
    ) -> list[Document]:
        """A document for every prompt of these documents: the prompt and what the trunk made of it."""
        asked = prompts(documents, self.prompts, tokenizer, self.prompt_tokens, self.seed)
        settings = [str(value) for value in astuple(self)[:-2]]  # neither changes what is written
        ids = json.dumps([prompt.token_ids for prompt in asked])
        path = cache_folder(cache_dir) / f"distilled-{digest(fingerprint, ids, *settings)}.jsonl"
        with locked(path.with_suffix(".lock")):
            written = self._written(path, asked, continue_text)
        return [self._document(prompt, new) for prompt, new in zip(asked, written, strict=True)]

    def _document(self, prompt: Prompt, new: list[int]) -> Document:
        name = hashed_name(prompt)
        learn_from = 0 if self.learn_prompt else len(prompt.token_ids)
        return Document(name, prompt.text, token_ids=prompt.token_ids + new, learn_from=learn_from)

    def _written(self, path: Path, asked: list[Prompt], continue_text: ContinueText) -> list[list[int]]:
        """What stands in the file, after what was missing has been appended."""
        found = read_lines(path)
        if len(found) < len(asked):
            tell(f"the trunk writes {len(asked) - len(found)} of {len(asked)} texts to {path}")
            keep_lines(path, len(found))
            for first in shown(range(len(found), len(asked), self.batch_size), "groups of texts"):
                some = asked[first : first + self.batch_size]
                seeds = [self.seed + first + place for place in range(len(some))]
                ids = [prompt.token_ids for prompt in some]
                new = continue_text(ids, seeds, self.temperature, self.new_tokens)
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in new)
                found += new
        return found[: len(asked)]


def hashed_name(prompt: Prompt) -> str:
    """A name for the order of documents: the prompt's document and its beginning."""
    return f"{prompt.document}:{digest(prompt.text)[:16]}"


def read_lines(path: Path) -> list[list[int]]:
    """The whole lines of the file, up to the first that is cut off."""
    found: list[list[int]] = []
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("]\n"):
            break
        found.append(json.loads(line))
    return found


def keep_lines(path: Path, count: int) -> None:
    """Drop what is behind the first `count` lines."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:count] if path.is_file() else []
    part = path.with_suffix(".part")
    part.write_text("".join(lines), encoding="utf-8")
    os.replace(part, path)
