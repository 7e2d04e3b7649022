"""Neural networks as pure functions on trees of parameters, without hidden state."""

from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import HEADS, Head
from fedshot.nn.models.backbones import BACKBONES, Backbone
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer, OptState

__all__ = [
    "BACKBONES",
    "HEADS",
    "Backbone",
    "Head",
    "Mode",
    "Model",
    "OptState",
    "Optimizer",
    "value_and_grad",
]
