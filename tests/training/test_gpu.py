"""On a CUDA device: training in bfloat16, saved, stopped and taken up again."""

import math

import pytest
import torch
from test_train import metrics, run, stop_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = ["trainer.max_steps=20", "trainer.checkpoint_every=5", "trainer.validate_every=10"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_twenty_steps_in_bfloat16_are_saved_and_a_stopped_run_ends_where_the_straight_one_does(
    overrides, tmp_path, precision
):
    """Up to the order in which a GPU adds: the losses agree, the weights nearly."""
    options = [*overrides, *STEPS, f"trainer.precision={precision}"]
    straight = run(options, tmp_path / "straight")
    parts = tmp_path / "parts"
    with pytest.raises(SystemExit):
        stop_after(12, lambda: run(options, parts))
    resumed = run(options, parts, "resume=true")
    assert straight.keys() == resumed.keys()
    for name, weight in straight.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0.05, atol=0.03)
    ends = [
        {(step, key): float(value) for step, key, value in metrics(folder)[1:]}
        for folder in (tmp_path / "straight", parts)
    ]
    assert all(math.isfinite(value) for value in ends[0].values())
    assert ends[1] == pytest.approx(ends[0], rel=0.05, abs=0.05)
