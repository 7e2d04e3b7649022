"""Where clients run, and what can be wrapped around it."""

from fedshot.fleets.client_checks import checked_round
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.influence import Influence, NormPolicy, check_norms
from fedshot.fleets.meter import LedgerLine, Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.fleets.unreliable import CORRUPT, Trouble, Unreliable, by_chance
from fedshot.fleets.vectorised import Vectorised

__all__ = [
    "CORRUPT",
    "Guard",
    "Host",
    "Influence",
    "LedgerLine",
    "Meter",
    "NormPolicy",
    "PrivateStore",
    "Sequential",
    "Threads",
    "Trouble",
    "Unreliable",
    "Vectorised",
    "by_chance",
    "check_norms",
    "checked_round",
]
