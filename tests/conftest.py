"""Fixtures that many tests share.

torch and what needs it are imported inside them: the process that only hands tests to the workers reads this
file too, and the workers wait for it.
"""

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One worker a core: threads of their own would only wait for each other.

    Before every test, as an entry point that a test calls sets what its config says.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def network():
    from tiny import tiny_network

    return tiny_network()


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        words = (f"w{number}x{place * place % (50 + number)}" for place in range(60))
        (folder / f"{number:02}.txt").write_text("\n".join(words) + "\n")
    return str(folder)


@pytest.fixture
def overrides(texts, tmp_path) -> list[str]:
    from tiny import TINY

    return [*TINY, f"data.source.path={texts}", f"data.cache_dir={tmp_path / 'cache'}"]
