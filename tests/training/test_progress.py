from training import progress


def test_without_a_terminal_long_work_says_now_and_then_how_far_it_is(monkeypatch, capsys):
    now = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    assert list(progress.shown("abcdefgh", "letters")) == list("abcdefgh")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["letters: 3 of 8, 38%", "letters: 6 of 8, 75%"]


def test_short_work_says_nothing(capsys):
    assert list(progress.shown([1, 2], "numbers")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_of_several_processes_the_first_speaks(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        progress.tell(f"from {rank}")
    assert capsys.readouterr().err == "from 0\n"
