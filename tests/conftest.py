"""Fixtures that many tests share."""

import pytest
import torch
from tiny import TINY, tiny_network

from mtp import Network

torch.set_num_threads(1)  # one worker a core: threads of their own would only wait for each other


@pytest.fixture(scope="session")
def network() -> Network:
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
    return [*TINY, f"data.source.path={texts}", f"data.cache_dir={tmp_path / 'cache'}"]
