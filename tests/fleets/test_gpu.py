"""The methods on a pretended GPU: the numbers of a CPU, and no waiting in client work.

Quick: a method of each kind of client function on the sequential fleet. Slow: all others there,
and one of each kind on the vectorised fleet. Exhaustive: the others on that fleet, whose numbers
on a CPU are those of the sequential one with each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.cases import METHODS, REFUSED, WHOLE
from conformance.conftest import KEEP_STATES
from covering import covering
from fedshot.conformance.federation import (
    Federation,
    FixedCohort,
    FleetCase,
    RunTensors,
    assert_same,
)
from fedshot.conformance.small import (
    CLASSES,
    CLIENTS,
    DATASET,
    episodic_test,
)
from fedshot.core import tree
from fedshot.core.graphs import Recording
from fedshot.core.seeds import Key
from fedshot.data.episodes.group_sampler import GroupSampler
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.client_checks import WorkChecks
from fedshot.fleets.host import Host
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.streams import Streams
from fedshot.fleets.vectorised import Vectorised
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.nn.models.recurrent import GRU, BiLSTM
from fedshot.nn.models.resnet import ResNet12
from fedshot.protocol.exchange import Fleet, Reply
from fedshot.protocol.method import Method
from nn.models.user_nets import Conv4Module, SmallViT
from pretend_gpu import DEVICE, PretendGpu, pretend_gpu

COHORTS = {"sequential": (5,), "vectorised": (5, 0)}  # a stack has two clients
WORK = "client work"

# Reads in one client's work. Other methods have none.
READS_OF_WORK = {
    "pfedfsl, without zeros": 1,  # the size of the packed upload is the number of non-zeros
}
COPIES = 10  # at most, for a client and exchange, each way: one per dtype, and the rows of examples
# At most: whether a class has no support, which examples are set aside, whether a matrix is
# singular; in FedCGS the shrinkage, once for all episodes.
READS_OF_EPISODE = 4


class Checks(WorkChecks):
    """Checks that record what happens in client work under its name."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def run(self, *given: Any) -> Reply:
        with self.gpu.during(WORK):
            return super().run(*given)


def on(
    fleet: str, gpu: PretendGpu | None = None, refused: dict[Any, str] | None = None
) -> FleetCase:
    """Return a fleet on the GPU, or on the CPU if there is none."""

    def build(host: Host) -> Fleet:
        device = torch.device(DEVICE if gpu else "cpu")
        host.devices = (device,)
        if gpu:
            host.checks = Checks(gpu)
        if fleet == "graphs":
            streams = Streams(host, most=2)
            streams.graphs[device].refused = {} if refused is None else refused
            return streams
        return Sequential(host) if fleet == "sequential" else Vectorised(host, 2)

    return FleetCase(fleet, build, exact=False, rtol=1e-7, atol=1e-9)


def predicted(run: Federation, test: EpisodicTest, gpu: PretendGpu | None = None) -> RunTensors:
    """Return the logits of a test; a run evaluates with the server's state on its device."""
    clients = FixedCohort(run.fleet, range(CLIENTS), round=run.round, phase="evaluate", choose=None)
    device = torch.device(DEVICE if gpu else "cpu")
    found = run.method.evaluate(
        tree.to(run.server, device),
        clients,
        test.eval_episodes.on(device),
        run.key.at("exam"),
    )
    return RunTensors({f"{p.eval_episode} by {p.client}": p.logits for p in found}, run.where)


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretend_gpu() as found:
        yield found


def small(method: Any) -> Method[Any]:
    """Return a method in float64 that takes one local step."""
    steps = {"local_steps": 1} if vars(method).get("local_steps") == 2 else {}
    return replace(method, model=replace(method.model, dtype="float64"), **steps)


# One of each kind of client function; the other methods are slow tests.
QUICK = ("fl_proto", "f2l", "frl", "fedncm")
FIRST_FORMS = {type(method): name for name, method in reversed(METHODS.items())}.values()
CASES = [
    pytest.param(name, fleet, id=f"{name}-{fleet}",
                 marks=[getattr(pytest.mark, mark) for mark in ("slow", "exhaustive")[:marks]])
    for fleet, fast, usual in (("sequential", QUICK, METHODS), ("vectorised", (), WHOLE))
    for name in METHODS
    if (name, fleet) not in REFUSED and (fleet == "sequential" or name in FIRST_FORMS)
    for marks in [(name not in fast) + (name not in usual)]
]  # fmt: skip


@pytest.mark.parametrize(("name", "fleet"), CASES)
def test_a_method_has_the_numbers_of_a_cpu_and_does_not_wait(
    name: str, fleet: str, tmp_path: Path
) -> None:
    """In training and a test; methods that keep states train a second round, which reads them."""
    method, cohort, test = small(METHODS[name]), COHORTS[fleet], episodic_test(2)
    rounds = 2 if name in KEEP_STATES else 1
    expected = Federation(method, on(fleet), tmp_path / "cpu").train(rounds, choose=cohort)
    with pretend_gpu() as gpu:
        found = Federation(method, on(fleet, gpu), tmp_path / "gpu").train(rounds, choose=cohort)
        works = len(found.executions)
        reads = READS_OF_WORK.get(name, 0) * works
        assert gpu.count("read", "up", part=WORK) == reads, gpu.events
        assert gpu.count("read", part="") == 0, gpu.events
        assert 0 < gpu.count("down", part="") <= COPIES * works, gpu.events
        assert 0 < gpu.count("up", part="") <= COPIES * works, gpu.events
        gpu.events.clear()
        logits = predicted(found, test, gpu)
        assert gpu.count("read") <= READS_OF_EPISODE * len(test), gpu.events
    assert_same(found.everything(), expected.everything())
    assert_same(logits, predicted(expected, test))


# Work whose kernels depend on values: it runs without recording.
NOT_RECORDED = {"pfedfsl, without zeros"}
GRAPHS = [
    pytest.param(name, marks=[] if name == "fl_proto" else pytest.mark.slow)
    for name in METHODS
    if name in FIRST_FORMS or name in NOT_RECORDED
]


@pytest.mark.parametrize("name", GRAPHS)
def test_work_recorded_for_one_client_gives_the_numbers_of_others(
    name: str, tmp_path: Path
) -> None:
    """The first call of a form is not recorded, the second is; the others are replays."""
    method, refused, replays = small(METHODS[name]), dict[Any, str](), 0
    cohort = (5, 0, 3, 2)
    expected = Federation(method, on("sequential"), tmp_path / "cpu").train(2, choose=cohort)
    with pretend_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        start = Recording.start

        def counted(self: Recording, inputs: Any) -> Any:
            nonlocal replays
            replays += 1
            return start(self, inputs)

        patch.setattr(Recording, "start", counted)
        found = Federation(method, on("graphs", gpu, refused), tmp_path / "gpu")
        found.train(2, choose=cohort)
    assert_same(found.everything(), expected.everything())
    assert (replays > 0) == (name not in NOT_RECORDED)
    assert bool(refused) == (name in NOT_RECORDED), refused


def test_clients_dealt_over_two_gpus_have_the_sums_of_one(tmp_path: Path) -> None:
    found = []
    for n in (1, 2):
        devices = tuple(torch.device("cuda", i) for i in range(n))

        def build(host: Host, devices: Any = devices) -> Fleet:
            host.devices = devices
            return Streams(host, most=2)

        with pretend_gpu():
            run = Federation(
                small(METHODS["fl_proto"]), FleetCase("gpus", build), tmp_path / str(n)
            )
            found.append(run.train(2, choose=(5, 0, 3, 2, 4, 1)).everything())
    assert_same(*found)


@pytest.mark.parametrize(("name", "reads"), [
    ("frl", 4),  # the clients' numbers of examples
    ("frl_one_shot", 17),  # the same, twice, and the score of each of three candidates
    *(pytest.param(name, 4, marks=pytest.mark.slow)
      for name in ("frl, linear", "frl, official", "frl_finetune", "frl_frozen", "frl_personal")),
])  # fmt: skip
def test_a_group_of_test_clients_has_the_numbers_of_a_cpu(
    name: str, reads: int, tmp_path: Path
) -> None:
    spec, group = EpisodeSpec(way=3, shot=2, query=2), GroupSampler(2, spare=1)
    test = EpisodicTest.draw(DATASET, range(CLASSES), spec, 2, Key(0).at("test"), group=group)
    method = small(METHODS[name])
    expected = predicted(Federation(method, on("sequential"), tmp_path / "cpu"), test)
    with pretend_gpu() as gpu:
        found = predicted(Federation(method, on("sequential", gpu), tmp_path / "gpu"), test, gpu)
    assert_same(found, expected)
    assert gpu.count("read") <= reads * len(test), gpu.events


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FIRST_FORMS
])  # fmt: skip
def test_in_float32_no_kernel_of_the_cpu_is_used(name: str, tmp_path: Path) -> None:
    """It would ask for the address of a tensor, which is refused."""
    with pretend_gpu() as gpu:
        run = Federation(METHODS[name], on("sequential", gpu), tmp_path).train(
            choose=COHORTS["sequential"]
        )
        logits = predicted(run, episodic_test(1), gpu)
    assert all(leaf.isfinite().all() for leaf in logits.values())


TEXTS = (
    GRU(3), GRU(3, kernel="cell"), BiLSTM(3), BiLSTM(3, pooling="mean"),
    BiLSTM(3, pooling="attention"), BiLSTM(3, pooling="attention", kernel="cell"),
)  # fmt: skip
TABLE = torch.linspace(-1, 1, 28).view(7, 4)
MODULES = (
    ModuleBackbone().hold(Conv4Module()), ModuleBackbone(tune="norm").hold(SmallViT(dropout=0.2)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("backbone", "dtype"),
    covering([MLP(), ResNet12((4, 4, 6, 6)), *MODULES, *TEXTS], ["float32", "float64"]),
    ids=str,
)
def test_a_backbone_has_the_gradients_of_a_cpu(backbone: Any, dtype: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    if backbone in TEXTS:
        model = Model(backbone, None, (5, 4), dtype=dtype, table=TABLE)
        words = torch.randint(1, 7, (4, 5), generator=draw, dtype=torch.int32)
        x = words * (torch.arange(5) < torch.tensor([[5], [2], [1], [3]]))
    else:
        model = Model(backbone, None, (8, 8, 1), dtype=dtype)
        x = torch.randint(256, (4, 8, 8, 1), generator=draw, dtype=torch.uint8)
    params, stats = model.init(Key(0))

    def gradient(params: Any, stats: Any, x: torch.Tensor, seed: torch.Tensor) -> Any:
        def loss(w: Any) -> tuple[torch.Tensor, None]:
            h, _ = model.features(w, stats, x, Mode(train=True, norm="batch", seed=seed))
            return h.square().mean(), None

        return value_and_grad(loss, params)[2]

    given = params, stats, x, torch.tensor(7)
    expected = gradient(*given)
    with pretend_gpu() as gpu:
        there = tree.to(given, torch.device(DEVICE))
        found = gradient(*there)
        assert gpu.count("read") <= 1, gpu.events  # the length of the longest text
        found = tree.to(found, torch.device("cpu"))
    near = 1e-12 if dtype == "float64" else 1e-4
    tree.map(partial(torch.testing.assert_close, rtol=near, atol=near), found, expected)


def test_a_tree_is_copied_to_a_gpu_as_one_tensor_per_dtype(gpu: PretendGpu) -> None:
    content = {
        "a": torch.ones(2, 3), "b": torch.tensor(2.0), "empty": torch.ones(0, 4),
        "n": {"1": torch.arange(3), "2": torch.tensor(4)}, "turned": torch.rand(2, 3).T,
    }  # fmt: skip
    there = tree.to(content, torch.device(DEVICE))
    assert gpu.count("down") == 3  # float32, int64, and the one that is not contiguous
    again = tree.to(there, torch.device("cpu"))
    assert gpu.count("up") == 3
    assert tree.digest(again) == tree.digest(content)
    assert again["turned"].stride() == content["turned"].stride()
    memory = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(again) if leaf.numel()}
    assert len(memory) == 5  # a leaf that is kept keeps no other
    same = tree.to({1: again["a"]}, torch.device("cpu"))
    assert same[1] is again["a"]


def test_the_pretended_gpu_refuses_what_cuda_refuses(gpu: PretendGpu) -> None:
    x, here = torch.ones(3, device=DEVICE), torch.arange(3)
    assert x.device == torch.device(DEVICE)
    assert (x + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]  # a number may be on the CPU
    for refused in (
        lambda: x + here,
        lambda: torch.stack([x[0], torch.tensor(1.0)]),
        lambda: here[x.long()],
        lambda: x.long()[None] @ x.long(),
        lambda: torch.randn(2, device=DEVICE, generator=torch.Generator()),
        x.numpy,
        x.data_ptr,
    ):
        with pytest.raises((RuntimeError, TypeError)):
            refused()


def test_the_pretended_gpu_records_reads_and_copies(gpu: PretendGpu) -> None:
    x = torch.arange(3.0).to(DEVICE)
    assert gpu.count("down") == 1
    for read in (
        x[0].item, lambda: bool(x.any()), lambda: int(x[1]), x.tolist, x.nonzero,
        lambda: x[x > 0],
    ):  # fmt: skip
        before = gpu.count("read")
        with gpu.during("a part"):
            read()
        assert gpu.count("read") == before + 1
    assert gpu.count("read") == gpu.count("read", part="a part")
    assert x.cpu().tolist() == [0.0, 1.0, 2.0]
    assert gpu.count("up") == 1


def test_the_pretended_gpu_leaves_nothing_behind() -> None:
    before = torch.tensor, torch.cuda._lazy_init
    with pretend_gpu():
        assert torch.tensor([1], device=DEVICE).device.type == "cuda"
    assert (torch.tensor, torch.cuda._lazy_init) == before
