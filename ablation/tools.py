"""What the ablation needs of the entry points: handed in, so that it knows neither Hydra nor Lightning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtp import Network
from training.text import Document

Compose = Callable[[str, list[str], str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions of the entry points."""

    compose: Compose  # config name, overrides and the key they stand under -> plain data
    train: Callable[[dict[str, Any]], None]  # one training run
    load: Callable[[str, str | None], Network]  # a network folder, and another one to take heads from
    skeleton: Callable[[dict[str, Any], dict[str, Any]], Network]  # trunk and heads of a config, no weights
    documents: Callable[[dict[str, Any], str], list[Document]]  # the config's data, name of a split
