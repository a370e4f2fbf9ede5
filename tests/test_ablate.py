"""The ablation: what its rows are, which of them are done, and how it goes on after a stop."""

import functools
import json

import hydra
import pytest
from drafters import tiny_draft
from tiny import tiny_network

import ablate
import entry
from ablation import rows as row_parts
from ablation.flops import training_flops
from ablation.plan import plan, selected
from ablation.search import candidates, needed
from ablation.session import Session
from decoding.results import read_results
from decoding.table import PACKAGES
from mtp import UserError

EXPERIMENTS = sorted(path.stem for path in (entry.CONF / "experiment" / "ablation").glob("*.yaml"))
ROWS = ["parallel/parallel", "sequential/sequential", "sequential/ngram", "early_exit/early_exit"]
TOOLS = ablate.tools({})


def composed(experiment="smoke", out="somewhere", **changes):
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        config = entry.plain(hydra.compose("ablate", [f"experiment=ablation/{experiment}", f"out={out}"]))
    return config | changes


def planned(*arguments, **changes):
    return plan(composed(*arguments, **changes), TOOLS)


@pytest.fixture
def folder(tmp_path):
    """A small network on the disk, for rows that train nothing."""
    tiny_network().save_pretrained(tmp_path / "tiny", provenance={"validation": {"val/trunk/loss": 4.0}})
    return tmp_path / "tiny"


def on_folder(folder, drafter="sequential", **changes):
    (row,) = planned(networks={"tiny": {"model": str(folder), "drafters": [drafter]}}, **changes)
    return row


@pytest.fixture
def stubbed(monkeypatch):
    """Neither trains nor decodes; says which rows were measured and stops where `stop_before` says."""
    measured = []

    def row(self, row):
        if row.name == row_stub.stop_before:
            raise KeyboardInterrupt
        measured.append(row.name)
        counts = {"tau": 1.0, "alpha": None, "conditional": [], "identical": True}
        speed = {"draft_cost": None, "tokens_per_second": 1.0, "speedup": 1.0}
        return {
            **row_parts.heading(row), "schema": row_parts.SCHEMA, "command": "c", "commit": None,
            "versions": dict.fromkeys(PACKAGES, "1"), "training": None, "draft_flops": 0,
            "settings": {key: self.config[key] for key in row_parts.SHOWN}, "machine": "m", "threads": 1,
            "dtype": "float32", "form": "plain", "expected": None, "parameters": {"head": 0},
            "trunk": {"loss": 1.0, "loss_alone": None, "repeated_4grams": None}, "model": "m",
            "chosen": {"num_draft_tokens": None, "verifier": None},
            "measured": {"greedy": counts | speed, "sampled": counts, "speedup_interval": None},
            "predicted": {"speedup": None, "speedup_32_layers": None},
            "timing": {"id": self.frame.timing_id},
        }  # fmt: skip

    row_stub = row
    row.stop_before, row.measured = None, measured
    monkeypatch.setattr(Session, "row", row)
    monkeypatch.setattr(Session, "finish", lambda self, every: None)
    monkeypatch.setattr(ablate.torch, "set_num_threads", lambda count: None)
    return row


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    config = composed(experiment)
    ablate.check_config(config)
    assert plan(config, TOOLS)
    assert len({row.id for row in plan(config, TOOLS)}) == len(plan(config, TOOLS))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_begins_with_its_command(experiment):
    lines = (entry.CONF / "experiment" / "ablation" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[:2] == ["# @package _global_", f"# python ablate.py experiment=ablation/{experiment}"]


def test_the_three_families_train_on_the_same_tokens_with_the_same_budget():
    rows = planned()
    assert [row.name for row in rows] == ROWS
    for key in ("data", "trainer", "trunk", "seed"):
        assert len({json.dumps(row.run.config[key], sort_keys=True) for row in rows}) == 1
    assert [list(row.run.config["heads"]) for row in rows] == [
        ["parallel"],
        ["sequential"],
        ["sequential"],
        ["early_exit"],
    ]


def test_the_seed_of_the_ablation_is_that_of_its_trainings():
    assert {row.run.config["seed"] for row in planned(seed=7)} == {7}


def test_a_row_is_another_when_anything_changes_that_its_numbers_depend_on(folder):
    known = {on_folder(folder).id}
    changes = [{"drafter": "ngram"}, {"num_draft_tokens": 3}, {"prompts": 5}, {"seed": 1}, {"longest": 5}]
    known |= {on_folder(folder, **change).id for change in changes}
    assert len(known) == 1 + len(changes)


def test_a_row_is_the_same_whatever_else_is_asked_for(folder):
    assert (
        on_folder(folder).id
        == on_folder(folder, out="elsewhere", only=["tiny/sequential"], again=True, timed=False).id
    )


def test_a_trained_row_is_the_same_in_any_folder():
    here, there = planned(out="here"), planned(out="there")
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


def test_rows_that_were_not_timed_are_measured_when_there_is_time(tmp_path, stubbed, monkeypatch):
    ablate.ablate(composed(out=str(tmp_path)), [])
    ablate.ablate(composed(out=str(tmp_path), repeats=2), [])
    assert stubbed.measured == ROWS * 2
    ablate.ablate(composed(out=str(tmp_path), repeats=1, timed=False), [])
    assert stubbed.measured == ROWS * 2


def test_only_may_be_a_pattern():
    rows = planned("tiny")
    assert {row.setting for row in selected(rows, ["frozen_trunk/*"])} == {"frozen_trunk"}
    assert {row.drafter for row in selected(rows, ["*/ngram"])} == {"ngram"}


def test_every_setting_has_its_families_and_every_trunk_its_yardsticks():
    rows = planned("tiny")
    found = {(row.setting, row.network) for row in rows if row.budget == "tokens"}
    families = {"parallel", "sequential", "sequential_repeated", "early_exit", "early_exit_dropout"}
    for setting in ("equal_parameters", "equal_trunk"):
        assert {network for name, network in found if name == setting} >= families | {"plain_6"}
    assert ("joint", "all") in found
    for trunk in {row.model for row in rows}:
        drafters = {row.build["_target_"].split(".")[-2] for row in rows if row.model == trunk}
        assert drafters >= {"ngram", "draft_model"}


def test_equal_parameters_take_the_heads_layers_out_of_the_trunk():
    rows = [row for row in planned("tiny") if row.setting == "equal_parameters" and row.family]
    layers = {row.family: row.run.config["trunk"]["config"]["num_hidden_layers"] for row in rows}
    heads = {row.family: row.run.config["heads"] for row in rows}
    assert layers["early_exit"] == 6
    for family in ("parallel", "sequential", "sequential_repeated"):
        (head,) = heads[family].values()
        assert layers[family] + head["depth"] == 6


def test_equal_runs_are_made_once_whatever_they_are_called():
    rows = {(row.setting, row.network): row for row in planned("tiny") if row.budget == "tokens"}
    first, second = rows["equal_parameters", "early_exit"], rows["equal_trunk", "early_exit"]
    assert first.run is second.run
    assert (first.content, first.id == second.id) == (second.content, False)


def test_the_reference_is_the_same_trunk_on_the_same_tokens_without_heads():
    for row in planned("tiny"):
        if row.alone is not None:
            run, alone = row.run.config, row.alone.config
            assert (alone["heads"], alone["objective"]["p_max"]) == ({}, 0.0)
            assert alone["trunk"] == run["trunk"]
            assert (alone["data"], alone["seed"]) == (run["data"], run["seed"])


def test_the_heads_of_a_frozen_trunk_know_the_run_that_makes_it():
    rows = planned("tiny")
    grafted = [row.run.trunk for row in rows if row.setting == "frozen_trunk"]
    assert all(trunk is grafted[0] for trunk in grafted)
    assert any(row.run is grafted[0] for row in rows if row.network == "plain_6")
    here, there = (planned("tiny", out=out) for out in ("here", "there"))
    assert [row.id for row in here] == [row.id for row in there]


def test_with_equal_flops_no_family_costs_more_than_the_cheapest_with_equal_tokens():
    rows = [row for row in planned("tiny") if row.setting == "equal_parameters" and row.family]
    costs = {}
    for row in rows:
        config = row.run.config
        token = training_flops(ablate.skeleton(row.run.trunk_config, config["heads"]), config)
        costs[row.budget, row.family] = (token, token * config["trainer"]["max_steps"])
    least = min(total for (budget, _), (_, total) in costs.items() if budget == "tokens")
    for (budget, _), (token, total) in costs.items():
        assert budget == "tokens" or least - token < total <= least


def test_every_family_is_searched_with_as_many_candidates_of_as_many_tokens():
    for experiment in ("tiny", "small", "base"):
        config = composed(experiment)
        found = candidates(config, TOOLS)
        counts = {}
        for one in found:
            counts[one.setting, one.family] = counts.get((one.setting, one.family), 0) + 1
        assert len(set(counts.values())) == 1
        trainer = [one.run.config["trainer"] for one in found]
        assert len({setting["max_steps"] for setting in trainer}) == 1
        assert {one.run.config["seed"] for one in found} == {0}


def test_a_search_is_made_only_for_what_is_asked():
    config = composed("tiny")
    found, rows = candidates(config, TOOLS), planned("tiny")
    some = needed(found, selected(rows, ["equal_trunk/parallel/*"]), config["settings"])
    assert {(one.setting, one.family) for one in some} == {("equal_parameters", "parallel")}
    with_flops = needed(
        found, selected(rows, ["equal_parameters/parallel/parallel/flops"]), config["settings"]
    )
    assert {one.setting for one in with_flops} == {"equal_parameters"}
    assert len({one.family for one in with_flops}) == 5


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
        ("timed=maybe", "timed=maybe is not one of True, False"),
        ("seeds=[]", "seeds=[] is not a list of seeds"),
        ("budgets=[time]", "budgets=['time'] is not a list of tokens, flops"),
        ("+settings.x={families: {}}", "settings.x.families is not {family: [overrides]}"),
        ("+settings.x={families: {mine: []}}", "settings.x.families: mine is not one of"),
        ("+settings.x={family: {}}", "settings.x has family; it may have budgets, families, search, train"),
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


def test_a_search_that_favours_a_family_is_refused():
    families = {
        "a": {"train": [], "drafters": [], "search": [[]]},
        "b": {"train": [], "drafters": [], "search": [[], []]},
    }
    settings = {"x": {"families": {"a": [], "b": []}}}
    with pytest.raises(UserError, match="as many candidates for each, but a has 1, b has 2"):
        Session(composed(families=families, settings=settings), [], TOOLS)
