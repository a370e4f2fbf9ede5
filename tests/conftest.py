"""Fixtures that many tests share."""

import pytest
import torch
from tiny import tiny_network

from mtp import Network

torch.set_num_threads(1)  # one worker a core: threads of their own would only wait for each other


@pytest.fixture(scope="session")
def network() -> Network:
    return tiny_network()
