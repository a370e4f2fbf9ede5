import inspect
from itertools import chain
from pathlib import Path

import hydra
import lightning
import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from mtp.errors import UserError
from training.batches import Share
from training.data import TextData
from training.files import Files

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "conf" / "data").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path) -> str:
    """Sixty small files that do not resemble each other."""
    for number in range(60):
        words = (f"w{number}x{place * place % (50 + number)}" for place in range(60))
        path = tmp_path / "texts" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(words) + "\n")
    return str(tmp_path / "texts")


def data(folder: str, **options) -> TextData:
    options = {
        "row_length": 16,
        "batch_size": 3,
        "validation_fraction": 0.1,
        "held_out_fraction": 0.1,
        **options,
    }
    made = TextData(Files(folder), **options)
    made.attach(made.train_tokenizer(300))
    return made


def composed(variant: str) -> dict:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose("train", [f"data={variant}"])["data"])


def names(made: TextData, split: str) -> list[str]:
    return [document.name for document in made.documents(split)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_yaml_file_has_every_default_of_the_signatures_and_no_other(path):
    config = composed(path.stem)
    for node in (config, config["source"], *filter(None, [config["self_distilled"]])):
        parameters = inspect.signature(get_class(node["_target_"])).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        found = {key: value for key, value in node.items() if key not in ("_target_", "source")}
        if path.stem == "self_distilled" and "self_distilled" in found:
            found["self_distilled"] = None  # that file is there to set it
        assert found == defaults


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_yaml_file_makes_a_data_module(path):
    assert isinstance(instantiate(composed(path.stem)), TextData)


def test_lists_from_a_config_are_taken_as_paths(folder):
    config = OmegaConf.load(ROOT / "conf" / "data" / "files.yaml")
    config.source.path = [folder + "/0*.txt", folder + "/11.txt"]
    assert len(instantiate(config).source.documents()) == 11


def test_splits_are_disjoint_complete_and_stable(folder):
    made = data(folder)
    parts = [names(made, split) for split in ("train", "validation", "held_out")]
    assert sorted(chain(*parts)) == [f"{number:02}.txt" for number in range(60)]
    assert all(parts)
    assert parts == [names(data(folder, seed=5), split) for split in ("train", "validation", "held_out")]


def test_an_unknown_split_is_refused(folder):
    with pytest.raises(UserError, match="train, validation, held_out"):
        data(folder).documents("test")


def test_max_bytes_takes_a_prefix_in_the_order_of_hashes(folder):
    everything = {document.name: document.text for document in data(folder).documents("train")}
    small, large = (data(folder, max_bytes=size).documents("train") for size in (1500, 3000))
    for limit, taken in ((1500, small), (3000, large)):
        size = sum(len(document.text.encode()) for document in taken)
        assert limit - 20 < size <= limit
        assert all(everything[document.name].startswith(document.text) for document in taken)
    assert [document.name for document in large][: len(small)] == [document.name for document in small]
    assert names(data(folder, max_bytes=1500), "held_out") == names(data(folder), "held_out")


def test_a_single_long_line_is_cut_to_max_bytes_and_trains(tmp_path):
    (tmp_path / "line.txt").write_text("größe " * 100_000)
    made = TextData(Files(str(tmp_path / "line.txt")), row_length=16, batch_size=2, max_bytes=1000)
    made.attach(made.train_tokenizer(300))
    assert 990 < len(made.documents("train")[0].text.encode()) <= 1000
    assert next(iter(made.train_dataloader()))["tokens"].shape == (2, 16)


def test_each_epoch_is_another_permutation_of_all_rows(folder):
    stream = data(folder).train_dataloader()
    count, rows = len(stream.rows), []
    for step in range(2 * count):
        rows += [tuple(row) for row in stream.batch(step)["tokens"].tolist()]
    epochs = [rows[start : start + count] for start in range(0, 6 * count, count)]
    everything = sorted(tuple(stream.rows[number]["tokens"].tolist()) for number in range(count))
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)


def test_a_batch_is_a_function_of_seed_and_step(folder):
    one, two, other = (data(folder, seed=seed).train_dataloader() for seed in (1, 1, 2))
    for step in (7, 1000, 3, 0):
        assert all(torch.equal(one.batch(step)[key], two.batch(step)[key]) for key in ("tokens", "documents"))
    assert not torch.equal(one.batch(0)["tokens"], other.batch(0)["tokens"])
    assert torch.equal(next(iter(one))["tokens"], one.batch(0)["tokens"])


def test_several_processes_share_each_step_between_them(folder):
    made = data(folder)
    stream = made.train_dataloader()
    ranks = [type(stream)(stream.rows, 3, 0, rank=rank, ranks=2) for rank in range(2)]
    expected = torch.cat([stream.batch(step)["tokens"] for step in range(4)])
    found = torch.cat([rank.batch(step)["tokens"] for step in range(2) for rank in ranks])
    assert torch.equal(found, expected)


def test_training_rows_are_shuffled_by_seed_and_validation_rows_are_not(folder):
    one, two = data(folder, seed=1), data(folder, seed=2)
    assert not torch.equal(one.train_dataloader().rows[0]["tokens"], two.train_dataloader().rows[0]["tokens"])
    for left, right in zip(one.val_dataloader(), two.val_dataloader(), strict=True):
        assert torch.equal(left["tokens"], right["tokens"])
        assert left["documents"].dtype == torch.int64


def test_batches_say_where_documents_are_isolated_and_their_states_have_another_name(folder):
    mixed, alone = data(folder), data(folder, isolate=True)
    one, two = mixed.train_dataloader(), alone.train_dataloader()
    assert torch.equal(one.batch(0)["tokens"], two.batch(0)["tokens"])
    assert two.batch(0)["isolated"].tolist() == [True] * len(two.batch(0)["tokens"])
    assert "isolated" not in one.batch(0)
    assert one.rows.key != two.rows.key
    assert all(batch["isolated"].all() for batch in alone.val_dataloader())


def test_validation_rows_can_be_limited(folder):
    assert sum(len(batch["tokens"]) for batch in data(folder, max_validation_rows=5).val_dataloader()) == 5
    assert list(data(folder, max_validation_rows=0).val_dataloader()) == []
    everything = data(folder, max_validation_rows=None).val_dataloader()
    assert sum((batch["documents"] >= 0).sum() for batch in everything) > 500


def test_no_validation_documents_are_noted_and_skipped(folder, caplog):
    made = data(folder, validation_fraction=0.0)
    assert list(made.val_dataloader()) == []
    assert "validation is skipped" in caplog.text
    train(made, 2)


def test_a_validation_file_named_and_empty_is_noted_and_skipped(folder, tmp_path, caplog):
    (tmp_path / "val.txt").write_text("")
    made = TextData(Files(folder, validation=str(tmp_path / "val.txt")), row_length=16)
    made.attach(made.train_tokenizer(300))
    assert list(made.val_dataloader()) == []
    assert "validation is skipped" in caplog.text


def test_validation_without_a_single_target_is_noted_and_skipped(folder, tmp_path, caplog):
    (tmp_path / "val.txt").write_text("a")
    made = TextData(Files(folder, validation=str(tmp_path / "val.txt")), row_length=16)
    made.attach(PreTrainedTokenizerFast(tokenizer_object=made.train_tokenizer(300).backend_tokenizer))
    assert list(made.val_dataloader()) == []
    assert "found 1 tokens" in caplog.text


def test_a_validation_file_named_is_what_validates(folder, tmp_path):
    made = TextData(Files(folder, validation=f"{folder}/07.txt"), held_out_fraction=0.1)
    assert names(made, "validation") == ["07.txt"]
    assert len(names(made, "train")) + len(names(made, "held_out")) == 59


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("row_length", 1),
        ("batch_size", 0),
        ("batch_size", True),
        ("seed", -1),
        ("seed", "a"),
        ("max_bytes", 0),
        ("states", "int8"),
        ("isolate", "yes"),
        ("max_validation_rows", 1.5),
        ("validation_fraction", -0.1),
        ("held_out_fraction", float("nan")),
        ("held_out_fraction", 0.98),
    ],
)
def test_a_bad_value_is_refused_by_key_and_value(key, value):
    with pytest.raises(UserError, match=rf"data\.{key}.*{value}"):
        TextData(Files("unread"), **{key: value})


class Recorder(lightning.LightningModule):
    """Trains one number and remembers the batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["tokens"].tolist())
        return self.weight * batch["documents"].float().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(
    made: TextData, steps: int, *, resume: str | None = None, save: str | None = None, **options
) -> list[list]:
    module = Recorder()
    options = {"max_steps": steps, "val_check_interval": 5, "check_val_every_n_epoch": None, **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, datamodule=made, ckpt_path=resume, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    return module.seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_thirteen_and_thirteen_and_fourteen_steps_see_the_batches_of_forty(folder, tmp_path, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    straight = train(data(folder), 40, **options)
    resumed, checkpoint = [], None
    for steps in (13, 26, 40):
        following = str(tmp_path / f"{steps}.ckpt")
        resumed.append(train(data(folder), steps, resume=checkpoint, save=following, **options))
        checkpoint = following
    assert [len(part) for part in resumed] == [13 * accumulate, 13 * accumulate, 14 * accumulate]
    assert list(chain(*resumed)) == straight
    state = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state == [{"step": 40 * accumulate}]


@pytest.mark.parametrize("during", ["on_train_batch_end", "on_validation_end"])
def test_a_checkpoint_from_the_middle_of_training_resumes_with_the_next_batch(folder, tmp_path, during):
    path = str(tmp_path / "middle.ckpt")

    def save(trainer, module, *_):
        if trainer.global_step == 5:
            trainer.save_checkpoint(path)

    callback = lightning.Callback()
    setattr(callback, during, save)
    straight = train(data(folder), 12, callbacks=[callback])
    assert train(data(folder), 12, resume=path) == straight[5:]


def test_short_epochs_go_on_where_the_last_one_stopped_and_resume_exactly(folder, tmp_path):
    options = {"limit_train_batches": 4, "val_check_interval": 4, "check_val_every_n_epoch": 1}
    straight = train(data(folder), -1, max_epochs=5, **options)
    stream = data(folder).train_dataloader()
    assert straight == [stream.batch(step)["tokens"].tolist() for step in range(20)]
    first = train(data(folder), -1, max_epochs=2, save=str(tmp_path / "two.ckpt"), **options)
    second = train(data(folder), -1, max_epochs=5, resume=str(tmp_path / "two.ckpt"), **options)
    assert first + second == straight


@pytest.mark.parametrize(("ranks", "limit"), [(1, 5), (2, 5), (3, 7), (4, 4)])
def test_processes_share_validation_rows_and_none_counts_twice(folder, ranks, limit):
    rows = data(folder, max_validation_rows=limit).val_dataloader().dataset.rows
    shares = [Share(rows, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    taken = [share[place] for place in range(len(shares[0])) for share in shares]
    real = [row["tokens"].tolist() for row in taken if (row["documents"] >= 0).any()]
    assert real == [rows[number]["tokens"].tolist() for number in range(limit)]
