"""The sections of a configuration that are neither data, partition, network nor method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedshot.config import settings as trees
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast1, Cores, Share
from fedshot.data.dataset import Dataset
from fedshot.data.tokens import Tokens
from fedshot.fleets.unreliable import Chances
from fedshot.nn.heads import Head
from fedshot.nn.models.backbones import Backbone
from fedshot.nn.models.model import Model


@dataclass(frozen=True)
class ModelOptions:
    """A model before it knows the data.

    Args:
        backbone: from images or words to features.
        head: from features to logits.
        norm_policy: the batch-norm statistics of a test: "running" those of training, "support"
            those of the support set, "transductive" those of the queries. Where a group of clients
            holds the support, "group" joins what each has, and "support" takes a client's own for
            its queries. "method" is the method's choice: "running" for prototypes, "group" for
            what a group learns, "support" for MAML, which on Omniglot (Conv4-32, first
            order, 20 rounds) reaches 72.6 % with it and 41.6 % with "running".
        dtype: of parameters and features.
        pixel_mean: subtracted from pixels in [0, 1].
        pixel_std: pixels are divided by it.
        bf16: convolutions and matrix products of the backbone in bfloat16, all else in float32; so
            is the first block of a Conv4 where the compiled kernels take it.
    """

    backbone: Backbone
    head: Head | None
    norm_policy: Literal["method", "running", "support", "transductive", "group"] = "method"
    dtype: Literal["float32", "float64"] = "float32"
    pixel_mean: float = 0.5
    pixel_std: float = 0.5
    bf16: bool = False

    def build(self, dataset: Dataset) -> Model:
        """Return the model for the images of a dataset, or for its texts and their vectors."""
        x = dataset.x
        return self.of(dataset.shape, torch.tensor(x.table) if isinstance(x, Tokens) else None)

    def of(self, shape: tuple[int, ...], table: torch.Tensor | None) -> Model:
        """Return the model for examples of a shape, texts if there is a table of word vectors.

        A configuration has put a method's choice in the place of "method"; without one, "running".
        """
        return Model(
            self.backbone,
            self.head,
            shape,
            "running" if self.norm_policy == "method" else self.norm_policy,
            self.dtype,
            self.pixel_mean,
            self.pixel_std,
            self.bf16,
            table,
        )


@dataclass(frozen=True)
class RunOptions:
    """How long, how many, and what to do when clients fail.

    Args:
        rounds: communication rounds.
        cohort: clients sampled per round; null for all.
        quorum: share of a cohort whose replies must be usable.
        below_quorum: "stop" the run, or "skip" the round and go on from the state before it.
        infeasible_clients: clients that cannot form an episode: "refuse" the run, or "leave_out"
            the clients.
        validate_every: rounds between two looks at the validation classes; the last round always.
        choose: the round that is tested: that of the best "validation" accuracy, or the "last" one.
            "best_on_test_classes" looks at the test itself instead of the validation, as some
            published code does: no honest result, and marked as none wherever it is shown.
        checkpoint_every: rounds between two checkpoints; the best and the last round always.
        threads: intra-op threads of torch. Bits may differ between two values, never within one.
            null: 1, or all cores where one training step is 400 GFLOP or more (a ResNet-12 at 84
            pixels); what it came to stands in the run's config.yaml.
        fleet: where clients run: "threads", several at once, or "sequential", one by one, in the
            same bits; "vectorised", stacked, for GPUs and small heads, to rounding.
        chunk: the most clients in one stack under "vectorised". Bits depend on it.
        allocator: "keep" lets glibc keep freed memory for the next step, which is quicker for large
            images; "system" leaves it as it is.
        device: "cpu" or "cuda", which suits "sequential" and "vectorised".
        workers: clients that run at once under "threads", or stacks under "vectorised"; null for as
            many as cores and `threads` allow, and under "threads" for one where a step is so short
            that they would only wait for each other. The same bits for any number. "sequential"
            and a GPU refuse more than one.
        unreliable: rehearse failing clients.
    """

    rounds: AtLeast1 = 100
    cohort: AtLeast1 | None = None
    quorum: Share = 0.5
    below_quorum: Literal["stop", "skip"] = "stop"
    infeasible_clients: Literal["refuse", "leave_out"] = "refuse"
    validate_every: AtLeast1 = 10
    choose: Literal["validation", "last", "best_on_test_classes"] = "validation"
    checkpoint_every: AtLeast1 = 1
    threads: Cores | None = None
    fleet: Literal["threads", "sequential", "vectorised"] = "threads"
    chunk: AtLeast1 = 32
    allocator: Literal["keep", "system"] = "keep"
    device: Literal["cpu", "cuda"] = "cpu"
    workers: Cores | None = None
    unreliable: Chances = Chances()

    def __post_init__(self) -> None:
        if self.fleet == "sequential" and self.workers is not None and self.workers > 1:
            raise ConfigError(
                f"run.workers is {self.workers} with run.fleet 'sequential', which has one. Set "
                "run.fleet to 'threads', or leave run.workers out."
            )
        if self.device != "cpu" and self.workers is not None and self.workers > 1:
            raise ConfigError(
                f"run.workers is {self.workers} with run.device {self.device!r}, which takes one "
                "stack after another. Leave run.workers out."
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "run.device is 'cuda', and torch sees no CUDA device here. Use 'cpu', or install a "
                "build of torch for this machine's GPU and its driver."
            )
        if self.device == "cuda" and self.fleet == "threads":
            raise ConfigError(
                "run.device is 'cuda' with run.fleet 'threads', whose workers would wait for one "
                "GPU. Set run.fleet to 'vectorised', or to 'sequential' for large models."
            )


def not_honest(settings: Mapping[str, Any]) -> list[str]:
    """Return what makes a result of these settings no honest one, to be told beside its number."""
    found = []
    if trees.at(settings, "run.choose") == "best_on_test_classes":
        found.append("NOT HONEST: the test classes chose the round")
    if trees.at(settings, "test.first_client_only"):
        found.append("NOT HONEST: where clients answer, the first alone was scored")
    return found
