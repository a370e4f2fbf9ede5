import shutil
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_trunk

from mtp import Network, UserError
from mtp.checkpoint import build_head
from training.losses import HeadLoss, Objective
from training.module import Optimization, Training
from training.packing import Rows, Stream
from training.states import Wanted, folder_of, with_states, write_states


def rows(count: int = 12, row_length: int = 8) -> Rows:
    tokens = np.random.default_rng(0).integers(0, 64, count * row_length).astype(np.int32)
    return Rows(Stream(tokens, np.array([len(tokens)])), row_length)


def wanted(dtype: str = "float32", taps: tuple[int, ...] = (2, 4), **options) -> Wanted:
    return Wanted(tiny_trunk(**options), "a trunk", taps, dtype)


def frozen_run(network: Network) -> Training:
    """A run as it is before its first step."""
    optimization = Optimization(1e-3, 0, 1.0, 5, 0.0, (0.9, 0.95), 1.0, None)
    objective = Objective(0.2, "none", 1, 0.0, "constant")
    return Training(network, {"sequential": HeadLoss(each=1.0)}, objective, optimization, frozen=True)


def one_pass(want: Wanted, made: Rows) -> dict[int, torch.Tensor]:
    with torch.inference_mode():
        tokens = torch.stack([made[row]["tokens"] for row in range(len(made))])
        return want.trunk(tokens, taps=want.taps, logits=False).states


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_states_from_disk_are_those_of_the_trunk(tmp_path, dtype, close):
    want, made = wanted(dtype), rows()
    write_states(want, made, str(tmp_path))
    expected, found = one_pass(want, made), with_states(want, made, str(tmp_path))
    for row in (0, 7, 11):
        assert torch.equal(found[row]["tokens"], made[row]["tokens"])
        for tap in (2, 4):
            state = found[row][f"state_{tap}"]
            assert state.dtype == getattr(torch, dtype)
            torch.testing.assert_close(state.float(), expected[tap][row], rtol=close, atol=close)


def test_a_run_that_was_stopped_goes_on_behind_the_last_whole_row(tmp_path, monkeypatch):
    want, made = wanted(), rows()
    folder = write_states(want, made, str(tmp_path / "straight"))
    parts = folder_of(want, made, str(tmp_path / "parts"))
    parts.mkdir(parents=True)
    size = want.bytes_of_row(8)
    (parts / "tap2").write_bytes((folder / "tap2").read_bytes()[: 5 * size + 3])
    (parts / "tap4").write_bytes((folder / "tap4").read_bytes()[: 4 * size])
    asked = []
    monkeypatch.setattr(Rows, "__getitem__", spying(Rows.__getitem__, asked))
    write_states(want, made, str(tmp_path / "parts"))
    assert asked == list(range(4, 12))
    for tap in ("tap2", "tap4"):
        assert (parts / tap).stat().st_size == (folder / tap).stat().st_size
    assert (parts / "tap2").read_bytes()[: 4 * size] == (folder / "tap2").read_bytes()[: 4 * size]
    write_states(want, made, str(tmp_path / "parts"))
    assert len(asked) == 8


def spying(original, asked):
    def get(self, row):
        asked.append(row)
        return original(self, row)

    return get


def test_states_are_computed_as_the_run_computes(tmp_path):
    """Under autocast the trunk says something else; states from disk say the same."""
    want, made = wanted(taps=(4,)), rows()
    under = replace(want, precision="bf16-mixed", computing=lambda: torch.autocast("cpu", torch.bfloat16))
    for each in (want, under):
        write_states(each, made, str(tmp_path))
    with under.computing():
        expected = one_pass(want, made)[4]
    found, plain = (with_states(each, made, str(tmp_path)) for each in (under, want))
    for row in range(len(made)):
        torch.testing.assert_close(found[row]["state_4"], expected[row], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(plain[row]["state_4"], expected[row], atol=1e-3)


def test_another_trunk_text_dtype_or_precision_has_files_of_its_own(tmp_path):
    base, other = wanted(), Wanted(wanted().trunk, "another trunk", (2, 4), "float32")
    folders = [
        folder_of(base, rows(), None),
        folder_of(base, rows(11), None),
        folder_of(base, rows(24, 4), None),
        folder_of(other, rows(), None),
        folder_of(wanted("float16"), rows(), None),
        folder_of(replace(base, precision="bf16-mixed"), rows(), None),
    ]
    assert len(set(folders)) == 6


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(UserError, match=r"data\.states: the states of 12 rows take"):
        write_states(wanted(), rows(), str(tmp_path))
    assert not list(tmp_path.rglob("tap*"))


def test_a_state_beyond_float16_is_refused_by_size(tmp_path):
    want = wanted("float16")
    with torch.no_grad():
        want.trunk.model.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(UserError, match=r"data\.states=float16 cannot hold a state of size"):
        write_states(want, rows(), str(tmp_path))


def test_the_states_of_a_trunk_with_dropout_are_those_of_evaluation(tmp_path):
    trunk = tiny_trunk(attention_dropout=0.5)
    network = Network(trunk, {"sequential": build_head("sequential", trunk, depth=1)})
    frozen_run(network)
    want, made = Wanted(trunk, "a trunk", (4,), "float32"), rows()
    write_states(want, made, str(tmp_path))
    trunk.eval()
    expected, found = one_pass(want, made), with_states(want, made, str(tmp_path))
    for row in range(len(made)):
        torch.testing.assert_close(found[row]["state_4"], expected[4][row], rtol=1e-6, atol=1e-6)


def test_it_is_said_what_is_written_and_where(tmp_path, capsys):
    folder = write_states(wanted(), rows(), str(tmp_path))
    assert capsys.readouterr().err == f"the states of 12 rows: 0.0 MB are written to {folder}\n"
    write_states(wanted(), rows(), str(tmp_path))
    assert capsys.readouterr().err == ""
