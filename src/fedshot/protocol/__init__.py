"""How a method and a fleet meet: `exchange`, and the values around it."""

from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients, reduce_replies
from fedshot.protocol.exchange import (
    Arrival,
    Bank,
    ClientWork,
    Exchange,
    Fault,
    Fleet,
    Outcome,
    PerClient,
    Reply,
    client_work,
)
from fedshot.protocol.method import (
    Answer,
    Method,
    answer_all,
    answer_at_clients,
    answer_at_server,
    answer_from_features,
)
from fedshot.protocol.reading import answer_by_readout
from fedshot.protocol.reducers import Accumulator, Gather, Mean, Reducer, Sum

__all__ = [
    "Accumulator",
    "Answer",
    "Arrival",
    "Bank",
    "ClientWork",
    "Clients",
    "Exchange",
    "Fault",
    "Fleet",
    "Gather",
    "Mean",
    "Method",
    "Outcome",
    "PerClient",
    "Reducer",
    "Reply",
    "Sum",
    "answer_all",
    "answer_at_clients",
    "answer_at_server",
    "answer_by_readout",
    "answer_from_features",
    "average",
    "changes",
    "client_work",
    "reduce_replies",
]
