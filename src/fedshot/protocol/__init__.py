"""How a method and a fleet meet: `exchange`, and the values around it."""

from fedshot.protocol.averaging import OF_EXAMPLES, average, changes
from fedshot.protocol.clients import Clients, reduce_replies
from fedshot.protocol.exchange import (
    Arrival,
    ClientWork,
    Exchange,
    Fault,
    Fleet,
    Outcome,
    PerClient,
    Reply,
    client_work,
)
from fedshot.protocol.few_round import (
    Adapted,
    Asked,
    answer_group,
    census_reply,
    check_decay,
    check_rounds,
    few_rounds,
    message,
    predict,
    query_maps,
    slowed,
    told_by,
    update_reply,
)
from fedshot.protocol.group import Group
from fedshot.protocol.method import (
    Answer,
    Method,
    answer_all,
    answer_at_clients,
    answer_at_server,
    answer_from_features,
)
from fedshot.protocol.reading import answer_by_readout
from fedshot.protocol.reducers import LIGHTEST, Accumulator, Gather, Mean, Reducer, Sum
from fedshot.protocol.through_rounds import (
    pull_census_reply,
    pull_update_reply,
    through_rounds,
)

__all__ = [
    "LIGHTEST",
    "OF_EXAMPLES",
    "Accumulator",
    "Adapted",
    "Answer",
    "Arrival",
    "Asked",
    "ClientWork",
    "Clients",
    "Exchange",
    "Fault",
    "Fleet",
    "Gather",
    "Group",
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
    "answer_group",
    "average",
    "census_reply",
    "changes",
    "check_decay",
    "check_rounds",
    "client_work",
    "few_rounds",
    "message",
    "predict",
    "pull_census_reply",
    "pull_update_reply",
    "query_maps",
    "reduce_replies",
    "slowed",
    "through_rounds",
    "told_by",
    "update_reply",
]
