"""Plain decoding: nothing is drafted."""

from decoding.draft import Autoregressive
from mtp import Network


def build(network: Network) -> Autoregressive:
    return Autoregressive()
