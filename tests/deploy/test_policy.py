"""What a node lets a server ask for: refused by the name of the policy's line, and logged."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.serialised import LIMITS
from fedshot.deploy.flower import worker
from fedshot.deploy.flower.data_files import read_shards, write_shards
from fedshot.deploy.flower.masking_request import masking_to_json
from fedshot.deploy.flower.messages import COMMON, WireMessage
from fedshot.deploy.flower.policy import Policy, PolicyError
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.worker import ClientRuntime, Worker, run_work, without_paths
from fedshot.fleets.compressing import LARGEST
from fedshot.fleets.vectorised import Vectorised
from fedshot.methods.registry import METHODS
from fedshot.protocol.exchange import Arrival, Masking, Reply
from fedshot.protocol.reducers import Mean, Sum
from fedshot.runs.experiment import fleet_for
from fedshot.runs.prepare import PreparedRun
from system.runs import SMALL

METHOD = {"method": {"name": "fedavg_probe", "local_steps": 2, "batch": 4}}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The data of a node with two clients, and a message with work."""
    prepared, folder = PreparedRun(Config.of({**SMALL, **METHOD})), tmp_path_factory.mktemp("data")
    write_shards(folder, prepared.dataset, prepared.client_split.train, [0, 1])
    server = prepared.method.init(Key(0))
    wire_message = WireMessage({
        "setup": Setup.of("0" * 32, prepared).to_json(), "life": 1, "base": [-1, ""], "orders": [],
        "work": {"name": "classify", "phase": "train", "version": [1, 0], "as_of": None, "key": [0],
                 "clients": [0, 1]},
    })  # fmt: skip
    down = {"body": server.body, "classifier": server.classifier, "stats": server.stats}
    wire_message.put(
        COMMON, {"theta": {k: down[k] for k in ("body", "classifier")}, "stats": down["stats"]}
    )
    return read_shards(folder), wire_message


def answered(asked: Any, folder: Path, policy: Policy | None, **head: Any) -> WireMessage:
    holdings, wire_message = asked
    worker = Worker("n", holdings, folder, tell=lambda _: None, policy=policy)
    return worker.handle(WireMessage(wire_message.head | head, wire_message.blocks))


def test_a_policy_that_allows_all_changes_nothing_and_logs(asked: Any, tmp_path: Path) -> None:
    free = answered(asked, tmp_path / "free", None)
    (tmp_path / "bound").mkdir()
    bound = answered(asked, tmp_path / "bound", Policy(
        ("fedavg_probe",), ("theta", "stats"), 1.0, 4, 2, 2, 600.0, 1.0))  # fmt: skip
    assert "refused" not in free.head, free.head
    assert bound.blocks == free.blocks
    (line,) = (tmp_path / "bound" / "audit.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert told["work"]["name"] == "classify"
    assert told["up"] == {"clients": 2, "bytes": sum(map(len, free.blocks.values()))}
    assert told["refused"] == ""


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(methods=("fl_proto",)), "methods fl_proto, .* method 'fedavg_probe'"),
        (Policy(parts=("stats",)), "parts stats, .* part 'theta'"),
        (Policy(most_up_mb=1e-6), "most_up_mb 1e-06, .* MB"),
        (Policy(min_batch=8), "min_batch 8, .* method.batch 4"),
        (Policy(min_local_steps=3), "min_local_steps 3, .* method.local_steps 2"),
        (Policy(min_cohort=1000), "min_cohort 1000, .* a cohort of"),
        (Policy(secure_sums=True), "secure_sums true, .* uploads that are not masked"),
        (Policy(min_noise=0.5), "min_noise 0.5, .* uploads to which clients add no noise"),
        (Policy(most_disk_mb=1e-9), "most_disk_mb 1e-09, .* MB of states"),
    ],
)
def test_what_the_policy_does_not_allow_is_refused_by_its_name(
    asked: Any, tmp_path: Path, policy: Policy, words: str
) -> None:
    reply = answered(asked, tmp_path, policy)
    assert re.search(words, reply.head["refused"]), reply.head
    assert not reply.blocks, "nothing leaves"
    (line,) = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["refused"] == reply.head["refused"]


def test_a_method_without_the_option_that_a_line_bounds_is_refused() -> None:
    def refused(policy: Policy) -> dict[str, str]:
        found = {}
        ours = [name for name, cls in METHODS.items() if cls.__module__.startswith("fedshot.")]
        for name in ours:
            try:
                policy.check_run(Config.of({**SMALL, "method": {"name": name}}), 9)
            except PolicyError as error:
                found[name] = str(error).partition(" asks for ")[2].removesuffix(".")
        return found

    without = {name: f"method {name!r}, which has no `batch`" for name in (
        "fedfsl_naive", "fedfsl_prox", "fedfsl_mi", "fedfsl_mi_adv", "fedmeta", "f2l", "fl_proto",
        "fsl_local", "fedncm", "fedcgs", "fed3r",
    )}  # fmt: skip
    assert refused(Policy(min_batch=16)) == without
    assert refused(Policy(min_local_steps=1)) == {
        name: f"method {name!r}, which has no `local_steps`"
        for name in ("fedmeta", "fedncm", "fedcgs", "fed3r")
    }


def test_noise_is_enough_only_if_the_clients_add_it() -> None:
    def refusal(secure_sums: bool, noise: float | None, clients: int = 9) -> str:
        privacy = {"name": "client", "noise": noise, "epsilon": None if noise else 8.0}
        config = Config.of(
            {**SMALL, **METHOD, "run": {"secure_sums": secure_sums}, "privacy": privacy}
        )
        try:
            Policy(min_noise=1.0).check_run(config, clients)
        except ConfigError as error:
            return str(error)
        return ""

    assert not refusal(True, 1.0)
    assert "min_noise 1, and the server asks for privacy.noise 0.99" in refusal(True, 0.99)
    assert "asks for uploads to which clients add no noise" in refusal(False, 2.0)
    assert "privacy.noise is missing" in refusal(True, None)
    few = "for cohorts of 1000, in which a client's neighbours add 0.95."
    assert few in refusal(True, 3.0, 1000)
    assert not refusal(True, 3.2, 1000)


def test_a_node_lies_only_if_its_policy_says_so(asked: Any, tmp_path: Path) -> None:
    change = {**SMALL, **METHOD, "attack": {"name": "sign_flip", "from_round": 9}}
    setup = Setup.of("0" * 32, PreparedRun(Config.of(change))).to_json()

    def refusal(policy: Policy | None) -> str:
        reply = answered(asked, tmp_path, policy, setup=setup, hello=True)
        return str(reply.head.get("refused", ""))

    words = "the policy of this node has attack false, and the server asks for attack 'sign_flip'."
    assert words in refusal(None)
    assert words in refusal(Policy(min_cohort=2))
    assert not refusal(Policy(attack=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "frl", "inner_batch": 4}, "min_batch 8, .* method.inner_batch 4"),
        ({"name": "frl", "local_steps": 2, "inner_batch": 8}, ""),
        ({"name": "frl_finetune", "local_steps": 5}, "min_local_steps 2, .*prepare_steps 1"),
        (
            {"name": "frl_finetune", "local_steps": 5, "prepare_steps": 2, "batch": 4},
            "min_batch 8, .* method.batch 4",
        ),
        ({"name": "frl_frozen", "prepare_by": "clients", "prepare_steps": 2}, ""),
    ],
)
def test_the_steps_of_few_round_learning_are_bounded(options: dict[str, Any], words: str) -> None:
    policy, config = Policy(min_batch=8, min_local_steps=2), Config.of({**SMALL, "method": options})
    if not words:
        policy.check_run(config, 9)
        return
    with pytest.raises(PolicyError, match=words):
        policy.check_run(config, 9)


def test_no_gradient_of_a_single_step_leaves_where_more_steps_are_asked_for() -> None:
    up = {"gradient": {"w": torch.zeros(2)}, "stats": {}}
    Policy(min_local_steps=1).check_up(up, up)
    with pytest.raises(PolicyError, match=r"min_local_steps 2, .* part 'gradient', of one step"):
        Policy(min_local_steps=2).check_up(up, up)


def test_what_was_done_within_the_policy_s_seconds_is_sent(asked: Any, tmp_path: Path) -> None:
    whole = answered(asked, tmp_path / "free", None)
    (tmp_path / "bound").mkdir()
    reply = answered(
        asked, tmp_path / "bound", Policy(most_seconds=1e-9), sent=time.time(), within=1e6
    )
    assert "refused" not in reply.head
    assert reply.blocks == {"c0": whole.blocks["c0"]}
    assert reply.head["results"] == {
        "0": whole.head["results"]["0"],
        "1": {"fault": ["lost", "the policy of this node has most_seconds 1e-09, and the server "
                                "asks for more work."]},
    }  # fmt: skip


def test_nobody_works_for_a_server_that_waits_no_more(asked: Any, tmp_path: Path) -> None:
    reply = answered(asked, tmp_path, None, sent=time.time() - 60, within=1.0)
    assert "1 of 2 clients are done, and the server does not wait" in reply.head["refused"]
    assert not reply.blocks


def test_a_line_of_the_log_is_json_whatever_a_message_says(tmp_path: Path) -> None:
    worker = Worker("n", None, tmp_path, tell=lambda _: None, policy=Policy())  # type: ignore[arg-type]
    reply = WireMessage(
        {"refused": '\u2028\U0001f600"\\' * 500}, {f"c{i}": b"xy" for i in range(1000)}
    )
    odd = "\U0001f600" * 1000
    work = {"name": odd, "phase": odd, "version": [1, 0], "clients": list(range(1000))}
    worker.log({"setup": {"run": odd}, "work": work}, reply)
    worker.log({"setup": 5, "work": [1]}, WireMessage({}))
    first, second = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert first["up"] == {"clients": 1000, "bytes": 2000}
    assert first["work"]["clients"].startswith("[0, 1, 2")
    assert (second["run"], second["work"]) == ("", {})


def test_a_node_whose_log_cannot_be_written_goes_on_and_says_so(asked: Any, tmp_path: Path) -> None:
    holdings, wire_message = asked
    (tmp_path / "audit.jsonl").mkdir()
    said: list[str] = []
    worker = Worker("n", holdings, tmp_path, tell=said.append, policy=Policy())
    reply = worker.handle(WireMessage(wire_message.head, wire_message.blocks))
    assert set(reply.blocks) == {"c0", "c1"}
    (text,) = said
    assert "audit.jsonl lacks a message: " in text


@pytest.mark.parametrize(
    "text",
    ["methods: fl_proto", "methods: [[1]]", "most_up_mb: x", "most_up_mb: 0", "most_up_mb: .inf",
     "min_batch: 1.5", "min_local_steps: true", "min_cohort: 3.0", "secure_sums: 1", "attack: 0",
     "most: 5", "[1]", ""],
)  # fmt: skip
def test_a_policy_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        Policy.read(path)
    path.write_text("methods: [fl_proto, '5']\nmost_up_mb: 2.5\nmin_cohort: 3\nsecure_sums: true\n")
    expected = Policy(("fl_proto", "5"), None, 2.5, min_cohort=3, secure_sums=True)
    assert Policy.read(path) == expected


class Masked:
    """A runtime whose client replies with a masked upload, or with its step of a secure sum."""

    def run_work(self, work: Any, down: Any, clients: Any, masking: Any) -> Iterator[Arrival]:
        part = "answer" if masking is None else "masked"
        yield Arrival(0, Reply({part: torch.zeros(1000)}, {}, 1.0))


def test_a_policy_looks_at_the_parts_before_they_are_masked() -> None:
    """And not at the largest values of compressed ones."""
    largest = Sum({"theta:.": torch.zeros(())})
    masking = Masking(frozenset({0}), 3, {"theta": Mean(torch.zeros(2)), LARGEST: largest})
    work = {"name": "classify", "clients": [0], "masking": masking_to_json(masking)}
    step = {"name": "unmask", "clients": [0]}

    def answered(policy: Policy, work: Any) -> WireMessage:
        reply, runtime = WireMessage({}), cast(ClientRuntime, Masked())
        message = WireMessage({"work": work})
        message.put(COMMON, {})
        run_work(runtime, message, reply, LIMITS, policy)
        return reply

    for asked in (work, step):
        assert answered(Policy(parts=("theta",)), asked).blocks
        with pytest.raises(PolicyError, match="most_up_mb"):
            answered(Policy(most_up_mb=1e-6), asked)
    assert answered(Policy(parts=("stats",)), step).blocks
    with pytest.raises(PolicyError, match=r"parts stats, .* part 'theta'"):
        answered(Policy(parts=("stats",)), work)


def test_a_node_of_a_secure_run_sends_no_upload_that_is_not_masked(
    asked: Any, tmp_path: Path
) -> None:
    run = {"run": {**SMALL["run"], "secure_sums": True}}
    setup = Setup.of("0" * 32, PreparedRun(Config.of({**SMALL, **METHOD, **run})))
    words = "run.secure_sums is true, but replies that are not masked are asked for"
    for phase in ("train", "evaluate"):
        head = {"setup": setup.to_json(), "work": asked[1].head["work"] | {"phase": phase}}
        reply = answered(asked, tmp_path, Policy(secure_sums=True), **head)
        assert (reply.head["refused"], reply.blocks) == (words, {})


def test_a_server_hears_no_folders_of_a_node() -> None:
    assert without_paths("/srv/a/x/life.json is damaged") == "life.json is damaged"
    assert without_paths(r"C:\a\b.txt: part theta/w") == "b.txt: part theta/w"
    told = without_paths("/srv/St. Mary's/x.json is damaged", Path("/srv/St. Mary's"))
    assert told == "x.json is damaged"


def test_a_node_that_adds_noise_says_nothing_of_its_data(asked: Any, tmp_path: Path) -> None:
    """Neither predictions that are not masked, nor why the work of a client fails."""
    privacy = {"name": "client", "noise": 1.0, "clip": 0.5}

    def replied(name: str, **changes: Any) -> tuple[str, WireMessage]:
        run = {**SMALL, **METHOD, "run": {**SMALL["run"], "secure_sums": True}, **changes}
        setup = Setup.of("0" * 32, PreparedRun(Config.of(run)))
        said: list[str] = []
        masking = {"masking": masking_to_json(Masking(frozenset({0, 1}), 3, {}))}
        work = asked[1].head["work"] | (masking if name == "train" else {"phase": name})
        head = {**copy.deepcopy(asked[1].head), "setup": setup.to_json(), "work": work}
        folder = tmp_path / f"{name}{len(changes)}"
        worker = Worker("n", asked[0], folder, tell=said.append)
        message = WireMessage(head)
        message.put(COMMON, {"theta": {}, "stats": {}})  # the model of the message is empty
        reply = worker.handle(message)
        return "\n".join(said), reply

    said, reply = replied("train")
    assert "client 0 failed: KeyError" in said
    assert "its work failed; the node's log says why" in str(reply.head["results"])
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    said, reply = replied("train", privacy=privacy)
    assert "KeyError" not in str(reply.head)
    assert "it has no keys for this exchange" in str(reply.head["results"])
    _, reply = replied("evaluate", privacy=privacy)
    assert "not masked are asked for" in reply.head["refused"]


def test_a_node_has_a_device_of_its_own_and_the_fleet_and_allocator_of_the_run(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"run": {**SMALL["run"], "device": "cuda", "fleet": "vectorised"}}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # at the server
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        setup = Setup.of("0" * 32, PreparedRun(Config.of({**SMALL, **METHOD, **run})))
    fleets: list[Any] = []
    kept: list[bool] = []
    monkeypatch.setattr(
        worker, "fleet_for", lambda *words: fleets.append(fleet_for(*words)) or fleets[0]
    )
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: kept.append(True))
    reply = answered(asked, tmp_path, None, setup=setup.to_json())
    assert sorted(reply.head["results"]) == ["0", "1"], reply.head
    (fleet,) = fleets
    assert isinstance(fleet, Vectorised)
    assert (fleet.host.device, kept) == (torch.device("cpu"), [True])
