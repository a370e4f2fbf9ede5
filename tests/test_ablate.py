"""The ablation: what its rows are, which of them are done, and how it goes on after a stop."""

import functools
import json

import hydra
import pytest
from drafters import tiny_draft
from omegaconf import OmegaConf
from tiny import tiny_network

import ablate
import entry
from decoding.results import read_results
from decoding.table import PACKAGES
from mtp import UserError

EXPERIMENTS = sorted(path.stem for path in (entry.CONF / "experiment" / "ablation").glob("*.yaml"))
ROWS = ["parallel/parallel", "sequential/sequential", "sequential/ngram", "early_exit/early_exit"]


def composed(experiment="smoke", out="somewhere", **changes):
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        config = entry.plain(hydra.compose("ablate", [f"experiment=ablation/{experiment}", f"out={out}"]))
    return config | changes


@pytest.fixture
def folder(tmp_path):
    """A small network on the disk, for rows that train nothing."""
    tiny_network().save_pretrained(tmp_path / "tiny", provenance={"validation": {"val/trunk/loss": 4.0}})
    return tmp_path / "tiny"


def on_folder(folder, drafter="sequential", **changes):
    config = composed(networks={"tiny": {"model": str(folder), "drafters": [drafter]}}, **changes)
    return ablate.plan(config)[0]


@pytest.fixture
def stubbed(monkeypatch):
    """Neither trains nor decodes; says which rows were measured and stops where `stop_before` says."""
    measured = []

    def measure(row, config, argv):
        if row.name == stubbed_measure.stop_before:
            raise KeyboardInterrupt
        measured.append(row.name)
        counts = {"tau": 1.0, "alpha": None, "conditional": []}
        speed = {"draft_cost": None, "tokens_per_second": 1.0, "speedup": 1.0}
        return {
            "id": row.id, "network": row.network, "drafter": row.drafter, "command": "c", "commit": None,
            "seed": 0, "versions": dict.fromkeys(PACKAGES, "1"), "validation": {}, "training_tokens": None,
            "settings": {key: config[key] for key in ablate.SETTINGS}, "machine": "m", "dtype": "float32",
            "form": "plain", "sampled": counts,
            "greedy": counts | speed | {"identical": True, "repeated_4grams": 0.0},
        }  # fmt: skip

    stubbed_measure = measure
    measure.stop_before, measure.measured = None, measured
    monkeypatch.setattr(ablate, "measure", measure)
    monkeypatch.setattr(ablate, "ensure_trained", lambda training: None)
    monkeypatch.setattr(ablate.torch, "set_num_threads", lambda count: None)
    return measure


@pytest.fixture
def training(tmp_path, monkeypatch):
    """The training config of one network in tmp_path, with train.py stubbed: every call stands in `calls`."""
    config = composed(out=str(tmp_path))
    training = ablate.compose_training(config, "sequential", ["head=[sequential]"])
    calls = []
    monkeypatch.setattr(ablate, "train", calls.append)
    return training, calls


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    config = composed(experiment)
    ablate.check_config(config)
    assert ablate.plan(config)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_begins_with_its_command(experiment):
    lines = (entry.CONF / "experiment" / "ablation" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[:2] == ["# @package _global_", f"# python ablate.py experiment=ablation/{experiment}"]


def test_the_three_families_train_on_the_same_tokens_with_the_same_budget():
    rows = ablate.plan(composed())
    assert [row.name for row in rows] == ROWS
    for key in ("data", "trainer", "trunk", "seed"):
        assert len({json.dumps(row.training[key], sort_keys=True) for row in rows}) == 1
    assert [list(row.training["heads"]) for row in rows] == [
        ["parallel"],
        ["sequential"],
        ["sequential"],
        ["early_exit"],
    ]


def test_the_seed_of_the_ablation_is_that_of_its_trainings():
    assert {row.training["seed"] for row in ablate.plan(composed(seed=7))} == {7}


def test_a_row_is_another_when_anything_changes_that_its_numbers_depend_on(folder):
    known = {on_folder(folder).id}
    changes = [{"drafter": "ngram"}, {"num_draft_tokens": 3}, {"prompts": 5}, {"seed": 1}, {"repeats": 1}]
    known |= {on_folder(folder, **change).id for change in changes}
    assert len(known) == 1 + len(changes)


def test_a_row_is_the_same_whatever_else_is_asked_for(folder):
    assert on_folder(folder).id == on_folder(folder, out="elsewhere", only=["tiny/sequential"], again=True).id


def test_a_trained_row_is_the_same_in_any_folder():
    here, there = ablate.plan(composed(out="here")), ablate.plan(composed(out="there"))
    assert [row.id for row in here] == [row.id for row in there]


def test_a_row_is_another_when_its_head_or_its_trunk_was_trained_anew(folder):
    before, lookup = on_folder(folder).id, on_folder(folder, "ngram").id
    weights = folder / "heads" / "sequential" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert on_folder(folder).id != before
    assert on_folder(folder, "ngram").id == lookup
    tiny_network(seed=1).save_pretrained(folder)
    assert on_folder(folder, "ngram").id != lookup


def test_a_drafter_may_have_options(folder, tmp_path):
    row = on_folder(folder, {"drafter": "early_exit", "exit_layer": 1})
    assert row.name == "tiny/early_exit exit_layer=1"
    assert row.build["exit_layer"] == 1
    assert row.id != on_folder(folder, "early_exit").id
    tiny_draft(tiny_network()).save_pretrained(tmp_path / "draft")
    row = on_folder(folder, {"drafter": "draft_model", "model": str(tmp_path / "draft")})
    build = ablate.drafter_maker(tiny_network(), row.build)
    assert build() is not build()


def test_rows_that_are_done_are_not_measured_again(tmp_path, stubbed):
    for _ in range(2):
        ablate.ablate(composed(out=str(tmp_path)), [])
    assert stubbed.measured == ROWS


def test_again_measures_all_and_only_measures_some(tmp_path, stubbed):
    ablate.ablate(composed(out=str(tmp_path), only=["sequential/ngram"]), [])
    ablate.ablate(composed(out=str(tmp_path), only=["sequential/ngram"], again=True), [])
    assert stubbed.measured == ["sequential/ngram"] * 2
    assert len(read_results(tmp_path / "results.jsonl")) == 1


def test_a_stopped_ablation_goes_on_and_ends_with_the_same_table(tmp_path, stubbed):
    ablate.ablate(composed(out=str(tmp_path / "whole")), [])
    stubbed.measured.clear()
    stubbed.stop_before = "sequential/ngram"
    with pytest.raises(KeyboardInterrupt):
        ablate.ablate(composed(out=str(tmp_path / "stopped")), [])
    assert len(read_results(tmp_path / "stopped" / "results.jsonl")) == 2
    stubbed.stop_before = None
    ablate.ablate(composed(out=str(tmp_path / "stopped")), [])
    assert stubbed.measured == ROWS
    tables = [(tmp_path / name / "table.md").read_text() for name in ("whole", "stopped")]
    assert tables[0] == tables[1]


def test_what_is_trained_already_is_not_trained_again(training):
    config, calls = training
    folder = ablate.Path(config["out"])
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text(json.dumps({"config": config | {"resume": True}}))
    ablate.ensure_trained(config)
    assert calls == []


def test_a_training_that_was_stopped_goes_on(training):
    config, calls = training
    leave_checkpoint(config)
    ablate.ensure_trained(config)
    assert calls == [config | {"resume": True}]


def test_a_checkpoint_of_another_config_is_not_gone_on_from(training):
    config, calls = training
    checkpoint = leave_checkpoint(config | {"seed": 1})
    ablate.ensure_trained(config)
    assert calls == [config]
    assert not checkpoint.exists()


def leave_checkpoint(config):
    checkpoint = ablate.Path(config["run_dir"], "checkpoints", "last.ckpt")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    OmegaConf.save(OmegaConf.create(config), checkpoint.parents[1] / "config.yaml")
    return checkpoint


def test_training_tokens_are_those_of_the_run_or_unknown(training):
    made = {"config": training[0]}
    assert ablate.training_tokens(made) == 300 * 8 * 128
    assert ablate.training_tokens({}) is None


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("only=[sequential]", "only=sequential is not one of parallel/parallel, "),
        (
            "networks.parallel.drafters=[paralel]",
            "networks.parallel.drafters: drafter=paralel is not one of ",
        ),
        ('networks.parallel.train=["trainer.lrr=1"]', "networks.parallel.train: unknown key trainer.lrr"),
        ('networks.parallel.train=["data.held_out_fraction=0"]', "networks.parallel.train: data.source, "),
        ("+networks.parallel.model=x", "networks.parallel has train, drafters, model; it needs"),
        ("+networks.x={model: nowhere/x/y, drafters: [none]}", "model: nowhere/x/y is not a network folder"),
        (
            "networks.parallel.drafters=[{drafter: ngram, max_gram: 3}]",
            "networks.parallel.drafters: ngram has no option max_gram; it has min_ngram, max_ngram",
        ),
        ("networks.parallel.drafters=[3]", "networks.parallel.drafters: 3 is neither a name nor"),
        ("networks.parallel.drafters=ngram", "networks.parallel.drafters='ngram' is not a list of drafters"),
        ("networks.sequential.drafters=[ngram,ngram]", "networks: sequential/ngram is there twice"),
        ("train=3", "train=3 is not a list of texts"),
        ("prompts=0", "prompts=0 is not a whole number of at least 1"),
        ("temperature=nan", "temperature=nan is not a finite number"),
        ("verifier=none", "verifier=none is not one of token, block"),
        ("out=null", "out is missing"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_anything_is_done(
    tmp_path, capsys, stubbed, argument, told
):
    with pytest.raises(SystemExit) as stopped:
        entry.run(functools.partial(ablate.ablate, argv=[]), "ablate", [f"out={tmp_path}/out", argument])
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(told)
    assert line.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_network_without_a_tokenizer_is_refused():
    with pytest.raises(UserError, match="tokenizer"):
        ablate.cut_prompts(tiny_network(), composed())
