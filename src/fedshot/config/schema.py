"""The sections `model` and `run` of a configuration, and which settings bias a result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedshot.config import settings as trees
from fedshot.core.devices import devices_of, gpu_arithmetic
from fedshot.core.errors import ConfigError
from fedshot.core.machine import arithmetic
from fedshot.core.ranges import Above0, AtLeast1, Cores, Majority, Share
from fedshot.data.dataset import Dataset
from fedshot.data.encoders.frozen import EncoderOptions
from fedshot.data.tokens import Tokens
from fedshot.fleets.client_times import ClockOptions
from fedshot.fleets.unreliable import Chances
from fedshot.nn.heads import Head
from fedshot.nn.models.backbones import Backbone
from fedshot.nn.models.model import Model


@dataclass(frozen=True)
class ModelOptions:
    """The network, its precision, and how it normalises its input and features.

    Args:
        backbone: network that computes features from images or words.
        head: layer that computes logits from features.
        norm_policy: which batch-norm statistics are used at test. "running": the running statistics
            of training. "support": those of the support set. "transductive": those of the queries.
            A support set may be spread over a group of clients: "support" then uses each client's
            own support examples for that client's queries. "group": like "support", but pools the
            statistics of all clients of the group. "method": the method chooses; most methods with
            prototypes take "running", few-round learning in groups "group", and MAML "support".
            On Omniglot, first-order MAML (Conv4-32, 20 rounds) reaches 72.6 % with "support" and
            41.6 % with "running".
        dtype: data type of parameters and features.
        pixel_mean: value subtracted from pixels in [0, 1].
        pixel_std: value by which pixels are then divided.
        encoder: frozen network that turns the data into features before training; None: the
            backbone takes the data themselves.
        bf16: whether to compute convolutions and matrix products of the backbone in bfloat16, and
            everything else in float32; the compiled kernels compute the first block of a Conv4 in
            float32, too.
    """

    backbone: Backbone
    head: Head | None
    norm_policy: Literal["method", "running", "support", "transductive", "group"] = "method"
    dtype: Literal["float32", "float64"] = "float32"
    pixel_mean: float = 0.5
    pixel_std: Above0 = 0.5
    bf16: bool = False
    encoder: EncoderOptions | None = None

    def build(self, dataset: Dataset) -> Model:
        """Return the model for a dataset of images, or of texts and their word vectors."""
        x = dataset.x
        return self.of(dataset.shape, torch.tensor(x.table) if isinstance(x, Tokens) else None)

    def of(self, shape: tuple[int, ...], table: torch.Tensor | None) -> Model:
        """Return the model for examples of a shape: images, or texts if `table` has word vectors.

        A validated configuration has replaced the norm policy "method" with the method's choice.
        Without a configuration, "method" means "running". Raises ConfigError if the backbone does
        not fit the examples.
        """
        policy = "running" if self.norm_policy == "method" else self.norm_policy
        pixels = self.pixel_mean, self.pixel_std
        model = Model(
            self.backbone, self.head, shape, policy, self.dtype, *pixels, self.bf16, table
        )  # fmt: skip
        self.backbone.out_features(shape)  # loads and tries a module of the user
        return model


@dataclass(frozen=True)
class RunOptions:
    """Length of training, clients per round, device, and handling of clients that fail.

    Args:
        rounds: number of communication rounds.
        cohort: number of clients sampled per round; null: all clients.
        quorum: minimum share of the cohort whose replies must be usable.
        below_quorum: what to do in a round with fewer usable replies: "stop" the run, or "skip" the
            round and continue from the state before it.
        infeasible_clients: what to do if clients cannot form an episode: "refuse" to run, or
            "leave_out" these clients.
        validate_every: rounds between two validations; the last round is always validated.
        choose: which round is tested: the round with the best "validation" accuracy, or the "last"
            round. "best_on_test_classes" chooses by accuracy on the test classes, as some published
            code does: such a result is too optimistic, and is marked NOT HONEST wherever it is
            shown.
        checkpoint_every: rounds between two checkpoints; the best and the last round always have a
            checkpoint.
        threads: number of torch's intra-op threads. The same number gives the same bits; another
            number may change the last bits of results. null: 1, or all cores if a training step
            takes 400 GFLOP or more (a ResNet-12 at 84 pixels); the run's config.yaml records the
            number.
        fleet: how clients run: "threads" runs several at once; "processes" does, too, on Linux, and
            is faster for small networks; "sequential" runs one after another. All three give the
            same bits. "vectorised" stacks clients, for small heads, and gives results that are
            equal up to rounding.
        chunk: maximum number of clients in one stack of the fleet "vectorised"; results for
            different values may differ in the last bits.
        allocator: "keep" lets glibc keep freed memory for the next step, which is faster for large
            images; "system" does not change the allocator.
        device: where to compute: "cpu", "cuda", a numbered GPU such as "cuda:1", several GPUs of
            one machine such as "cuda:0,cuda:1", among which the clients are divided, or "mps". A
            Flower node has its own setting: `fedshot flower node --device`.
        tf32: whether a GPU may round the inputs of convolutions and matrix products in float32 to
            10 bits of mantissa (TF32), which is several times faster.
        deterministic: whether a GPU gives the same bits in every run. Otherwise cuDNN chooses
            algorithms by timing them, and bits differ from run to run.
        workers: how many clients, or stacks of clients (fleet "vectorised"), run at once. null: as
            many as the cores allow with `threads` cores each. If steps are so short that threads
            would wait for each other, null means 1 for the fleet "threads". The number does not
            change results. The fleet "sequential" and a GPU allow only one worker.
        unreliable: simulated failures of clients.
        clock: simulated time.
        secure_sums: whether clients mask what they send in training, so that the server learns only
            the sum over a cohort; results have the same bits, unless `compress.up` rounds in them.
            With `privacy`, clients also clip, and add the noise. A method that does not only add
            what clients send is refused.
        secure_threshold: share of a cohort, above 1/2, that must be left at each step of a secure
            sum, else the round lacks its quorum. So many clients, or in large cohorts so many of a
            client's neighbours, can unmask that client if they collude with the server.
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
    fleet: Literal["threads", "processes", "sequential", "vectorised"] = "threads"
    chunk: AtLeast1 = 32
    allocator: Literal["keep", "system"] = "keep"
    device: str = "cpu"
    tf32: bool = True
    deterministic: bool = True
    workers: Cores | None = None
    unreliable: Chances = Chances()
    clock: ClockOptions = ClockOptions()
    secure_sums: bool = False
    secure_threshold: Majority = 0.66

    def __post_init__(self) -> None:
        if self.fleet == "sequential" and self.workers is not None and self.workers > 1:
            raise ConfigError(
                f"run.workers is {self.workers} with run.fleet 'sequential', which has one worker. "
                "Set run.fleet to 'threads', or leave run.workers out."
            )
        devices = devices_of(self.device)
        if self.device != "cpu" and self.workers is not None and self.workers > 1:
            raise ConfigError(
                f"run.workers is {self.workers} with run.device {self.device!r}, but a GPU runs "
                "many clients at once with one worker. Leave run.workers out."
            )
        if self.fleet == "processes" and (self.device != "cpu" or sys.platform != "linux"):
            raise ConfigError(
                f"run.fleet is 'processes', which needs Linux and run.device 'cpu'; here they are "
                f"{sys.platform} and {self.device!r}. Set run.fleet to 'threads'."
            )
        if self.fleet == "vectorised" and len(devices) > 1:
            raise ConfigError(
                f"run.device is {self.device!r} with run.fleet 'vectorised', which uses one "
                "device. Set run.fleet to 'threads'."
            )

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of clients; the server computes on the first."""
        return devices_of(self.device)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Set this process's threads and GPU arithmetic for a run; restore them afterwards."""
        assert self.threads is not None, "PreparedRun sets it"
        with ExitStack() as stack:
            stack.enter_context(arithmetic(self.threads))
            if self.device != "cpu":
                stack.enter_context(
                    gpu_arithmetic(tf32=self.tf32, deterministic=self.deterministic)
                )
            yield


def not_honest(settings: Mapping[str, Any]) -> list[str]:
    """Return notes on why settings bias the test result; empty if the result is a fair estimate."""
    found = []
    if trees.at(settings, "run.choose") == "best_on_test_classes":
        found.append("NOT HONEST: the test classes chose the round")
    if trees.at(settings, "test.first_client_only"):
        found.append("NOT HONEST: only the first client's predictions were scored")
    return found
