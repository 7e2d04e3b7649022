"""How a method and a fleet meet: `exchange`, and the values around it."""

from fedshot.protocol.averaging import OF_EXAMPLES, OF_FEATURES, average, changes, local_reply
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
from fedshot.protocol.few_round import (
    Adapted,
    Asked,
    Norms,
    census_reply,
    few_rounds,
    message,
    own_norms,
    told_by,
    update_reply,
)
from fedshot.protocol.group import Group
from fedshot.protocol.group_answers import GroupNorms, answer_group, in_group, predict, query_maps
from fedshot.protocol.method import (
    Answer,
    Method,
    answer_all,
    answer_at_clients,
    answer_at_server,
    answer_from_features,
    widest_test,
)
from fedshot.protocol.preparation import Preparation, Prepared, Prepares, StepBy
from fedshot.protocol.reading import answer_by_readout, embedded
from fedshot.protocol.reducers import LIGHTEST, Accumulator, Gather, Mean, Reducer, Sum
from fedshot.protocol.schedule import check_decay, check_rounds, slowed
from fedshot.protocol.through_rounds import (
    pull_census_reply,
    pull_update_reply,
    there,
    through_rounds,
)

__all__ = [
    "LIGHTEST",
    "OF_EXAMPLES",
    "OF_FEATURES",
    "Accumulator",
    "Adapted",
    "Answer",
    "Arrival",
    "Asked",
    "Bank",
    "ClientWork",
    "Clients",
    "Exchange",
    "Fault",
    "Fleet",
    "Gather",
    "Group",
    "GroupNorms",
    "Mean",
    "Method",
    "Norms",
    "Outcome",
    "PerClient",
    "Preparation",
    "Prepared",
    "Prepares",
    "Reducer",
    "Reply",
    "StepBy",
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
    "embedded",
    "few_rounds",
    "in_group",
    "local_reply",
    "message",
    "own_norms",
    "predict",
    "pull_census_reply",
    "pull_update_reply",
    "query_maps",
    "reduce_replies",
    "slowed",
    "there",
    "through_rounds",
    "told_by",
    "update_reply",
    "widest_test",
]
