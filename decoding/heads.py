"""Finding the head that a drafter needs."""

from typing import Any

from mtp import Network, UserError


def need_head(network: Network, name: str) -> Any:
    if name not in network.heads:
        has = ", ".join(network.heads) or "none"
        raise UserError(
            f"drafter={name}: the network has no {name} head, it has {has}; heads=FOLDER takes others"
        )
    return network.heads[name]
