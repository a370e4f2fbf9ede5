"""Networks: a trunk and the drafting heads that are built into it. Knows nothing of losses or decoding."""

from mtp.errors import UserError
from mtp.network import Network
from mtp.trunk import Trunk

__all__ = ["Network", "Trunk", "UserError"]
