"""What the report says of its rows follows from their numbers."""

import copy
import re

import pytest
from page_rows import synthetic_row, synthetic_rows

from ablation.page_findings import lead, sentences
from ablation.page_groups import views
from ablation.page_orderings import ORDERINGS, verdict
from ablation.page_readings import deeper, interval, spread, tau

DEEPER, _, COSTS, CHEAPEST, LIGHTEST = ORDERINGS


def plain(text):
    return re.sub("<[^>]+>", "", text)


def view_of(*drafters, seeds=3, setting="equal_parameters"):
    return views([synthetic_row(setting, name, name, seed) for name in drafters for seed in range(seeds)])[0]


def set_conditional(view, drafter, shares):
    """Fix what a drafter's rows say was accepted by depth, greedy and sampled."""
    for row in view.rows:
        if row["drafter"] == drafter:
            for mode in ("greedy", "token"):
                row["expected"][mode][3]["conditional"] = list(shares)


def test_acceptance_from_depth_two_on_counts_every_test_once():
    # 100 drafts: 50 accepted at depth 1, 25 of 50 at depth 2, 20 of 25 at depth 3: 45 of 75
    assert deeper([0.5, 0.5, 0.8]) == pytest.approx(45 / 75)
    assert deeper([0.5, 0.0, None]) == 0.0
    assert deeper([0.5]) is None


def test_the_interval_is_students():
    found = interval([1.0, 2.0, 4.0])
    half = 4.30 * (7 / 3) ** 0.5 / 3**0.5
    assert (found.low, found.high) == pytest.approx((7 / 3 - half, 7 / 3 + half))


@pytest.mark.parametrize(("ours", "theirs", "says"), [(0.8, 0.5, "confirmed"), (0.4, 0.5, "contradicted")])
def test_the_ordering_of_families_follows_the_numbers(ours, theirs, says):
    view = view_of("sequential", "parallel")
    set_conditional(view, "sequential", [0.7, ours, ours])
    set_conditional(view, "parallel", [0.7, theirs, theirs])
    for row in view.rows:  # the seeds differ a little
        shares = row["expected"]["token"][3]["conditional"]
        row["expected"]["token"][3]["conditional"] = [share + 0.001 * row["seed"] for share in shares]
    assert verdict(DEEPER.differences(view)) == says


def test_differences_are_paired_by_seed():
    view = view_of("sequential", "parallel")
    for row in view.rows:  # far apart between seeds, always 0.1 between families
        share = 0.3 + 0.2 * row["seed"] + 0.1 * (row["drafter"] == "sequential")
        row["expected"]["token"][3]["conditional"] = [0.7, share]
    assert DEEPER.differences(view) == pytest.approx([0.1, 0.1, 0.1])


def test_one_seed_is_said_to_be_one():
    text = plain(lead([view_of("sequential", "parallel", "early_exit", seeds=1)], ""))
    assert "one seed, agrees" in text
    assert "confirmed" not in text


def test_a_frozen_trunk_says_nothing_of_what_early_exit_costs():
    view = view_of("early_exit", setting="frozen_trunk")
    assert COSTS.differences(view) == []
    assert any("not trained along" in line for line in sentences(view))
    assert "What a drafter costs" not in plain("".join(sentences(view)))


def test_parallel_is_compared_with_the_cheapest_other_family():
    view = view_of("parallel", "sequential", "early_exit", seeds=1)
    for row in view.rows:
        cost = {"parallel": 0.3, "sequential": 0.25, "early_exit": 0.6}[row["drafter"]]
        row["measured"]["greedy"]["draft_cost"] = cost
    assert CHEAPEST.differences(view) == pytest.approx([-0.05])
    assert verdict(CHEAPEST.differences(view)) == "disagrees"


def test_the_clock_and_the_weights_are_asked_separately():
    view = view_of("parallel", "sequential", seeds=1)
    for row in view.rows:
        row["measured"]["greedy"]["draft_cost"] = 0.2 if row["drafter"] == "parallel" else 0.3
        row["predicted"]["draft_cost_by_weights"] = 0.4 if row["drafter"] == "parallel" else 0.3
    assert [verdict(one.differences(view)) for one in (CHEAPEST, LIGHTEST)] == ["agrees", "disagrees"]


def test_prompts_must_agree_too_where_they_are_told():
    view = view_of("sequential", "parallel")
    assert verdict(DEEPER.differences(view), DEEPER.over_prompts(view)) == "confirmed"
    for row in view.rows:  # one prompt of six says the opposite, so loudly that the others may be chance
        lines = row["expected"]["by_prompt"]["token"]
        accepted = 0.0 if row["drafter"] == "sequential" else 900.0
        lines[0] |= {"tested": [0.0, 1000.0], "accepted": [0.0, accepted]}
    assert verdict(DEEPER.differences(view), DEEPER.over_prompts(view)) == "undecided"


def test_the_fastest_is_named_with_its_number():
    view = view_of("sequential", "ngram", seeds=1)
    for row in view.rows:
        row["measured"]["greedy"]["speedup"] = 0.75 if row["drafter"] == "sequential" else 1.875
    said = plain("\n".join(sentences(view)))
    assert "ngram is fastest here, × plain decoding: 1.88, then sequential 0.75" in said
    assert "1 of 2 are faster than plain decoding" in said
    assert "Of the trained ones sequential is" in said


def test_a_row_that_is_not_plain_decodings_is_said_loudly():
    rows = synthetic_rows()
    rows[3]["measured"]["greedy"]["identical"] = False
    assert "In 1 of 65 greedy output was not plain decoding's" in plain(lead(views(rows), ""))


def test_yardsticks_are_merged_over_trunks_and_drafters_are_not():
    view = views(synthetic_rows())[0]
    labels = " ".join(group.label for group in view.groups(merged=True))
    assert labels == (
        "sequential sequential_repeated parallel early_exit early_exit_dropout ngram draft_model"
    )
    lookup = next(group for group in view.groups(merged=True) if group.label == "ngram")
    assert len(lookup.rows) == 9
    assert "ngram on parallel" in [group.label for group in view.groups()]


def test_budgets_are_views_of_their_own():
    rows = synthetic_rows(("equal_parameters",))
    more = copy.deepcopy(rows)
    for row in more:
        row["budget"] = "flops"
    titles = [view.title for view in views(rows + more)]
    assert titles[:2] == [
        "equal parameters, equal training tokens",
        "equal parameters, equal training FLOPs",
    ]


def test_a_spread_is_over_the_numbers_that_are_there():
    rows = [synthetic_row("joint", "joint", "sequential", seed) for seed in range(3)]
    rows[1]["expected"] = None
    assert spread(rows, tau("token")).count == 2
