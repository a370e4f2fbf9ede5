"""Meta's rule in the experiments that ship: a head's layers come out of the trunk."""

import pytest

import ablate
from ablation.plan import plan


@pytest.mark.parametrize("experiment", ["tiny", "small", "base"])
def test_networks_of_equal_parameters_have_as_many(experiment):
    """As the trunk without heads, of all its layers; sequential modules have projections besides."""
    config = ablate.compose("ablate", [f"experiment=ablation/{experiment}"], "experiment")
    tools = ablate.tools(config)
    rows = [row for row in plan(config, tools) if row.setting == "equal_parameters" and row.family]
    runs = {row.family: row.run for row in rows}
    counts = {
        family: sum(
            weight.numel() for weight in tools.skeleton(run.trunk_config, run.config["heads"]).parameters()
        )
        for family, run in runs.items()
    }
    assert {"parallel", "sequential", "sequential_repeated", "early_exit"} <= set(counts)
    whole = counts["early_exit"]  # which has no weights of its own
    assert counts["early_exit_dropout"] == whole
    for family, count in counts.items():
        assert 1 <= count / whole < (1.07 if family.startswith("sequential") else 1.001), family
