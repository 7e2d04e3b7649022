"""Networks as pure functions on parameter trees: no modules, no hidden state, no global seeds."""

from fedshot.nn.backbones import BACKBONES, MLP, Backbone, Conv4
from fedshot.nn.gradients import descend, value_and_grad
from fedshot.nn.heads import HEADS, CosineHead, Head, LinearHead, TwoLayerHead
from fedshot.nn.learners import InnerLoop, Learner, Lesson, Maml, Proto, Question
from fedshot.nn.losses import accuracy, cross_entropy, kl, proximal
from fedshot.nn.mode import Mode
from fedshot.nn.model import Model, count_parameters
from fedshot.nn.optim import Optimizer, OptState
from fedshot.nn.prototypes import (
    class_means,
    cosine_logits,
    prototype_logits,
    squared_distances,
)
from fedshot.nn.recurrent import GRU, BiLSTM
from fedshot.nn.resnet import ResNet12
from fedshot.nn.set_transformer import Queries, SetTransformer
from fedshot.nn.training import Lessons, Trained, check_budget, draw_lessons, local_sgd

__all__ = [
    "BACKBONES",
    "GRU",
    "HEADS",
    "MLP",
    "Backbone",
    "BiLSTM",
    "Conv4",
    "CosineHead",
    "Head",
    "InnerLoop",
    "Learner",
    "Lesson",
    "Lessons",
    "LinearHead",
    "Maml",
    "Mode",
    "Model",
    "OptState",
    "Optimizer",
    "Proto",
    "Queries",
    "Question",
    "ResNet12",
    "SetTransformer",
    "Trained",
    "TwoLayerHead",
    "accuracy",
    "check_budget",
    "class_means",
    "cosine_logits",
    "count_parameters",
    "cross_entropy",
    "descend",
    "draw_lessons",
    "kl",
    "local_sgd",
    "prototype_logits",
    "proximal",
    "squared_distances",
    "value_and_grad",
]
