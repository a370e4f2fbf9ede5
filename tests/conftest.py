"""Fixtures that many tests share."""

import pytest
from tiny import tiny_network

from mtp import Network


@pytest.fixture(scope="session")
def network() -> Network:
    return tiny_network()
