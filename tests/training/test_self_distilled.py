import pytest
from tiny import byte_tokenizer

from mtp import UserError
from training.packing import Rows, tokenize
from training.self_distilled import SelfDistilled
from training.text import Document

DOCUMENTS = [Document(f"{letter}.txt", f"{letter}{letter} one two\nthree four\n") for letter in "abcdef"]


class Writer:
    """Continues by as many tokens as the seed's last digit says, and remembers what it was asked."""

    def __init__(self, stop_at: int | None = None):
        self.asked, self.stop_at = [], stop_at

    def __call__(self, prompts, seeds, temperature, most):
        if self.stop_at is not None and seeds[-1] >= self.stop_at:
            raise KeyboardInterrupt
        self.asked += seeds
        return [[40 + seed % 10] * min(most, seed % 5 + 1) for seed in seeds]


def distil(writer: Writer, folder, **options) -> list[Document]:
    made = SelfDistilled(prompts=6, prompt_tokens=4, new_tokens=4, **options)
    return made.documents(DOCUMENTS, byte_tokenizer(), writer, "trunk", cache_dir=str(folder))


def test_a_document_is_a_prompt_and_what_the_trunk_made_of_it(tmp_path):
    documents = distil(Writer(), tmp_path, batch_size=4)
    assert len(documents) == len({document.name for document in documents}) == 6
    assert [document.token_ids[4:] for document in documents[:3]] == [[40], [41] * 2, [42] * 3]
    rows = Rows(tokenize(documents, byte_tokenizer()), 64)
    assert int(rows[0]["mask"].sum()) == sum(len(document.token_ids) - 4 for document in documents)
    assert all(document.learn_from == 0 for document in distil(Writer(), tmp_path, learn_prompt=True))


def test_text_is_written_once_and_a_stopped_run_goes_on(tmp_path):
    straight = distil(Writer(), tmp_path / "straight", batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        distil(Writer(stop_at=4), tmp_path / "parts", batch_size=2)
    file = next((tmp_path / "parts").glob("*.jsonl"))
    file.write_text(file.read_text() + "[1, 2")  # a line that was cut off
    second = Writer()
    assert distil(second, tmp_path / "parts", batch_size=5) == straight
    assert second.asked == [4, 5]
    third = Writer()
    assert distil(third, tmp_path / "parts") == straight
    assert third.asked == []
    distil(third, tmp_path / "parts", temperature=0.0)
    assert third.asked == list(range(6))


@pytest.mark.parametrize(
    ("key", "value"), [("prompts", 0), ("new_tokens", 1.5), ("seed", -1), ("temperature", -1.0)]
)
def test_a_bad_setting_is_told_by_its_key(key, value):
    with pytest.raises(UserError, match=f"data.self_distilled.{key}={value}"):
        SelfDistilled(**{key: value})
