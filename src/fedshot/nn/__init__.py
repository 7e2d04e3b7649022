"""Networks as pure functions on parameter trees: no modules, no hidden state, no global seeds."""

from fedshot.nn.backbones import BACKBONES, MLP, Backbone, Conv4
from fedshot.nn.classification import (
    Batch,
    Batches,
    Classifier,
    base_numbers,
    check_batches,
    draw_batches,
)
from fedshot.nn.client_model import ClientModel
from fedshot.nn.common_questions import (
    answer_common,
    common_forms,
    divergence,
    draw_common,
)
from fedshot.nn.decoupled import (
    F2LDefaults,
    F2LMode,
    F2LReading,
    InnerChoice,
    OptimizerChoice,
    chosen,
    f2l_defaults,
)
from fedshot.nn.gallery import Gallery, Sheet, features_of, pays
from fedshot.nn.gradients import descend, value_and_grad
from fedshot.nn.heads import HEADS, CosineHead, Head, LinearHead, TwoLayerHead
from fedshot.nn.learners import InnerLoop, Learner, Lesson, Maml, Proto, Question
from fedshot.nn.losses import (
    Clip,
    accuracy,
    clipped_kl,
    cross_entropy,
    floored_kl,
    jensen_shannon,
    kl,
    mean_gap,
    proximal,
)
from fedshot.nn.meta_sgd import MetaSgd
from fedshot.nn.mode import Mode
from fedshot.nn.model import Model, count_parameters
from fedshot.nn.nearness import Nearness, Reading
from fedshot.nn.optim import Optimizer, OptState, shortened
from fedshot.nn.others import (
    Reference,
    first_pool,
    first_share,
    init_share,
    keep_share,
    next_pool,
    next_share,
    others,
    pool_message,
    reference_model,
)
from fedshot.nn.outlook import PREDICTIONS, Outlook, Predictions, outlook, reference_logits
from fedshot.nn.prototypes import (
    class_means,
    cosine_logits,
    nearest_prototypes,
    prototype_logits,
    squared_distances,
    unit_rows,
)
from fedshot.nn.readout import PROBES, Probe, Readout
from fedshot.nn.recurrent import GRU, BiLSTM
from fedshot.nn.resnet import ResNet12
from fedshot.nn.set_transformer import Queries, SetTransformer
from fedshot.nn.training import (
    Lessons,
    Trained,
    check_budget,
    check_not_negative,
    draw_lessons,
    local_sgd,
    mean_gradient,
    mean_metrics,
)
from fedshot.nn.transfer import (
    distillation_loss,
    temperatures,
    transfer_loss,
)
from fedshot.nn.two_models import TwoModels

__all__ = [
    "BACKBONES",
    "GRU",
    "HEADS",
    "MLP",
    "PREDICTIONS",
    "PROBES",
    "Backbone",
    "Batch",
    "Batches",
    "BiLSTM",
    "Classifier",
    "ClientModel",
    "Clip",
    "Conv4",
    "CosineHead",
    "F2LDefaults",
    "F2LMode",
    "F2LReading",
    "Gallery",
    "Head",
    "InnerChoice",
    "InnerLoop",
    "Learner",
    "Lesson",
    "Lessons",
    "LinearHead",
    "Maml",
    "MetaSgd",
    "Mode",
    "Model",
    "Nearness",
    "OptState",
    "Optimizer",
    "OptimizerChoice",
    "Outlook",
    "Predictions",
    "Probe",
    "Proto",
    "Queries",
    "Question",
    "Reading",
    "Readout",
    "Reference",
    "ResNet12",
    "SetTransformer",
    "Sheet",
    "Trained",
    "TwoLayerHead",
    "TwoModels",
    "accuracy",
    "answer_common",
    "base_numbers",
    "check_batches",
    "check_budget",
    "check_not_negative",
    "chosen",
    "class_means",
    "clipped_kl",
    "common_forms",
    "cosine_logits",
    "count_parameters",
    "cross_entropy",
    "descend",
    "distillation_loss",
    "divergence",
    "draw_batches",
    "draw_common",
    "draw_lessons",
    "f2l_defaults",
    "features_of",
    "first_pool",
    "first_share",
    "floored_kl",
    "init_share",
    "jensen_shannon",
    "keep_share",
    "kl",
    "local_sgd",
    "mean_gap",
    "mean_gradient",
    "mean_metrics",
    "nearest_prototypes",
    "next_pool",
    "next_share",
    "others",
    "outlook",
    "pays",
    "pool_message",
    "prototype_logits",
    "proximal",
    "reference_logits",
    "reference_model",
    "shortened",
    "squared_distances",
    "temperatures",
    "transfer_loss",
    "unit_rows",
    "value_and_grad",
]
