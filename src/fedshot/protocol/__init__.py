"""The interface between methods and fleets: `exchange`, and the values around it."""

from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, PerClient, Reply, client_work
from fedshot.protocol.method import Method, Prediction, predict_at_clients, predict_at_server
from fedshot.protocol.reducers import Gather, Mean, Sum

__all__ = [
    "Clients",
    "Gather",
    "Mean",
    "Method",
    "Outcome",
    "PerClient",
    "Prediction",
    "Reply",
    "Sum",
    "average",
    "client_work",
    "local_reply",
    "predict_at_clients",
    "predict_at_server",
]
