"""The interface between methods and fleets: `exchange`, with its arguments and results."""

from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, PerClient, Reply, client_work
from fedshot.protocol.method import (
    ClientModels,
    EpisodicMethod,
    Method,
    ModelState,
    Prediction,
    ServerModel,
    Traits,
    diagnostic,
    predict_at_clients,
    predict_at_server,
)
from fedshot.protocol.reducers import Gather, Mean, Sum

__all__ = [
    "ClientModels",
    "Clients",
    "EpisodicMethod",
    "Gather",
    "Mean",
    "Method",
    "ModelState",
    "Outcome",
    "PerClient",
    "Prediction",
    "Reply",
    "ServerModel",
    "Sum",
    "Traits",
    "average",
    "client_work",
    "diagnostic",
    "local_reply",
    "predict_at_clients",
    "predict_at_server",
]
