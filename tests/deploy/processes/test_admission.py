"""Who is turned away: strangers, plain text, other authorities, and what is too large."""

from __future__ import annotations

import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.deploy.flower.data_files import read_shards
from fedshot.deploy.flower.messages import WireMessage
from fedshot.deploy.flower.server_folder import split_address
from fedshot.deploy.flower.setup import Setup

from .local_federation import LONG, LocalFederation, program, setting
from .test_killed import PRIVATE


def node_words(federation: LocalFederation, tmp_path: Path, *words: object) -> list[str]:
    """Return the command of a node with the data of another, on a state folder of its own."""
    data = federation.folder / "node-0" / "data"
    of_node = ("flower", "node", "--server", federation.address(), "--data", data)
    return [*map(str, (*of_node, "--state", tmp_path / "state", *words))]


def test_a_key_that_is_not_registered_is_turned_away(
    federation: LocalFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedshot.deploy.flower.keys import make_node_key

    make_node_key(tmp_path / "stranger.key")
    words = ("--ca", federation.home.ca, "--key", tmp_path / "stranger.key")
    assert main(node_words(federation, tmp_path, *words)) == 75
    assert "does not know this node's key" in capsys.readouterr().err


def test_a_certificate_of_another_authority_is_turned_away(
    federation: LocalFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedshot.deploy.flower.keys import make_server_keys

    make_server_keys(tmp_path / "other", ["127.0.0.1"])
    key = federation.folder / "node-0" / "node.key"
    words = ("--ca", tmp_path / "other" / "ca.pem", "--key", key)
    assert main(node_words(federation, tmp_path, *words)) == 2
    assert "certificate is not trusted" in capsys.readouterr().err


def test_a_client_that_speaks_plain_text_is_turned_away(
    federation: LocalFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx

    with pytest.raises(httpx.TransportError):
        httpx.post(
            f"http://{federation.address()}/v1/fleet/activate-node", content=b"", timeout=LONG
        )
    assert main(node_words(federation, tmp_path)) == 2
    assert "does not speak plain text" in capsys.readouterr().err


def test_a_node_does_not_send_in_the_clear_beyond_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--server", "192.0.2.1:9092", "--data", str(tmp_path)]
    assert main(["flower", "node", *words]) == 2
    assert "192.0.2.1 is not this machine" in capsys.readouterr().err
    words = ["--host", "0.0.0.0", "--folder", str(tmp_path / "server")]
    assert main(["flower", "server", *words]) == 2
    assert "ca.pem does not exist" in capsys.readouterr().err


def test_without_the_token_nobody_registers_or_begins_a_run(federation: LocalFederation) -> None:
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    key = (federation.home.nodes / "node-0.pub").read_bytes()
    trusting = ssl.create_default_context(cafile=str(federation.home.ca))
    with httpx.Client(verify=trusting, base_url=f"https://{federation.address()}") as client:
        for path in ("control/start-run", "control/register-node", "control/list-nodes",
                     "runtime/acquire-task", "runtime/push-messages"):  # fmt: skip
            for headers in ({}, {"x-fedshot-token": "0" * 64}):
                reply = client.post(f"/v1/{path}", content=b"", headers=headers)
                assert reply.status_code == 403, path
        for name, request in (
            ("pull-messages", PullMessagesRequest(node=Node(node_id=7))),
            ("activate-node", ActivateNodeRequest(public_key=key, heartbeat_interval=10.0)),
        ):
            unsigned = client.post(
                f"/v1/fleet/{name}", content=request.SerializeToString(),
                headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
            )  # fmt: skip
            assert unsigned.status_code == 401, (name, unsigned.text)
        assert client.get("/docs").status_code == 403
    token = federation.home.folder / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    for key in federation.folder.glob("**/*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key


def test_a_registered_node_does_not_speak_as_the_server(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """The server refuses its messages to another node, which would not believe them either."""
    import httpx
    from flwr.app import Message
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import get_object_tree

    from fedshot.core.serialised import LIMITS
    from fedshot.deploy.flower.connection import Connection
    from fedshot.deploy.flower.fleet import FlowerFleet
    from fedshot.deploy.flower.keys import load_node_key
    from fedshot.deploy.flower.wire import set_message_id

    key = load_node_key(federation.folder / "node-1" / "node.key")
    liar = Connection(federation.address(), key, federation.home.ca, tmp_path / "node.json", LIMITS)
    with federation.experiment(PRIVATE, {"run": {"rounds": 2}}) as there:
        rounds = there.run()
        next(rounds), next(rounds)
        before, fleet = federation.private(there), there.fleet
        while not isinstance(fleet, FlowerFleet):
            fleet = fleet.fleet
        nodes = {node.name: node for node in fleet.node_registry}
        victim, liar._node.node_id = nodes["node-0"].number, nodes["node-1"].number

        def forged() -> WireMessage:
            head = fleet.node_registry.message_to(nodes["node-0"]).head
            return WireMessage(head | {"life": 1 << 62, "base": [-1, ""]})

        for reply_to, source, to in (
            ("", 1, victim),  # Flower's number of the server
            ("", liar._node.node_id, victim),
            ("0" * 64, victim, 1),
        ):
            message = Message(forged().record(), victim, "query.fedshot", ttl=60.0)
            set_message_id(message)
            outline = message_to_proto(remove_content_from_message(message))
            outline.metadata.reply_to_message_id = reply_to
            outline.metadata.src_node_id, outline.metadata.dst_node_id = source, to
            with pytest.raises(httpx.HTTPStatusError) as refusal:
                liar._call("PushMessages", PushMessagesRequest(
                    node=liar._node, messages_list=[outline],
                    message_object_trees=[get_object_tree(message)],
                ))  # fmt: skip
            assert refusal.value.response.status_code == 403
        messenger = fleet._transport
        sign, messenger._sign = messenger._sign, None  # type: ignore[attr-defined]
        (incoming,) = messenger.send_and_receive({victim: forged()}, LONG)
        assert "it is not signed by the server" in incoming.reason
        messenger._sign = sign  # type: ignore[attr-defined]
        assert federation.private(there) == before
        records = list(rounds)
    liar.close()
    assert records
    assert not [fault for record in records for fault in record.faults]


@pytest.fixture
def line(federation: LocalFederation) -> Iterator[Callable[[str], ssl.SSLSocket]]:
    """Return a function that opens a connection to the server and sends it a text."""
    trusting = ssl.create_default_context(cafile=str(federation.home.ca))
    address = split_address(federation.address())
    with ExitStack() as stack:

        def send(text: str) -> ssl.SSLSocket:
            plain = stack.enter_context(socket.create_connection(address, LONG))
            made = stack.enter_context(trusting.wrap_socket(plain, server_hostname=address[0]))
            made.sendall(text.encode())
            return made

        yield send


def test_what_is_too_large_is_refused_before_it_is_read(
    line: Callable[[str], ssl.SSLSocket],
) -> None:
    both = "Content-Length: 10\r\nTransfer-Encoding: chunked"
    for method, path, header, status in (
        ("POST", "push-object", f"Content-Length: {1 << 40}", b"413"),
        ("POST", "push-messages", f"Content-Length: {1 << 20}", b"413"),
        ("POST", "push-object", "Transfer-Encoding: chunked", b"411"),
        ("GET", "push-object", "Transfer-Encoding: chunked", b"405"),
        ("POST", "push-object", both, b"400"),  # by uvicorn, or 411 by the gate
    ):
        text = f"{method} /v1/fleet/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}\r\n\r\n"
        got = line(text).recv(12).split()[1]  # nothing of what was announced is sent
        assert got == status or (header == both and got == b"411"), (method, path, header)


def test_what_comes_without_a_key_holds_no_memory_and_no_connection(
    federation: LocalFederation, line: Callable[[str], ssl.SSLSocket]
) -> None:
    """A body is not read before the key is known; half requests keep nobody else away."""
    from fedshot.deploy.flower.local import operator_of

    head = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    body = line(f"{head}Content-Length: {8 << 20}\r\n\r\n")  # and none of it
    assert body.recv(12).split()[1] == b"401"
    half = [line(head) for _ in range(80)]
    with suppress(ConnectionResetError):
        assert half[0].recv(1) == b""
    assert operator_of(federation.home).ready()
    whole = line(f"{head}Content-Length: 1\r\n\r\n")
    assert whole.recv(12).split()[1] == b"401", "who says all at once is heard"


def test_a_node_has_no_clients_but_those_that_the_operator_wrote(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """One that claims another's stays away, whoever comes first; the run goes on with the other."""
    from fedshot.deploy.flower.keys import load_public_keys, make_node_key
    from fedshot.deploy.flower.local import operator_of

    public = make_node_key(tmp_path / "double.key")
    keys = load_public_keys(federation.home.nodes)
    operator = operator_of(federation.home)
    operator.register(keys | {"double": public.read_bytes()})
    (federation.home.nodes / "double.json").write_text('{"clients": "9"}')
    words = ("--ca", federation.home.ca, "--key", tmp_path / "double.key")
    double = program(*node_words(federation, tmp_path, *words))
    try:
        assert double.stderr is not None
        for text in double.stderr:
            if "connected" in text:
                break
        change = {"method": {"name": "fedavg_probe"}, "run": {"rounds": 1}}  # weighs examples
        with federation.experiment(change) as run:
            records = list(run.run())
        assert not [fault for record in records for fault in record.faults]
        assert (
            "node double is left out: it reports client 0; in the server's folder it has clients 9"
        ) in federation.said
    finally:
        (federation.home.nodes / "double.json").unlink()
        double.kill()
        double.communicate()
        operator.register(keys)


def test_keys_come_and_go_while_the_server_runs(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """A new one is let in, one taken away is turned away, and nothing in the folder is fatal."""
    from fedshot.deploy.flower.keys import make_node_key
    from fedshot.deploy.flower.local import Registrar

    said: list[str] = []
    registrar, nodes = Registrar(federation.home, said.append), federation.home.nodes
    data = make_node_key(tmp_path / "late.key").read_bytes()
    words = node_words(
        federation, tmp_path, "--ca", federation.home.ca, "--key", tmp_path / "late.key"
    )
    late = nodes / "late.pub"
    try:
        late.write_bytes(data[: len(data) // 2])  # half copied
        for _ in range(3):
            registrar.update()
        assert len(said) == 1
        assert "late.pub is not a public key" in said[0]
        assert "late" not in registrar.known
        late.write_bytes(data)
        registrar.update()
        assert "late" in said[-1]
        there = program(*words)
        try:
            assert there.stderr is not None
            assert any("connected" in text for text in there.stderr)
        finally:
            there.kill()
            there.communicate()
        held = late.rename(tmp_path / "late.pub.away")
        registrar.update()
        assert "late" not in registrar.known
        away = program(*words)
        try:
            _, err = away.communicate(timeout=LONG)
        finally:
            away.kill()
            away.wait()
        assert away.returncode == 75, err
        assert "does not know this node's key" in err
        assert "Traceback" not in err
        held.rename(late)
        (nodes / "twin.pub").write_bytes(data)
        registrar.update()
        assert [text for text in said if "restart the server to admit this key again" in text]
        assert [text for text in said if "twin has the same key as late" in text]
        told = len(said)
        registrar.update()
        assert len(said) == told
    finally:
        for name in ("late.pub", "twin.pub"):
            (nodes / name).unlink(missing_ok=True)
        registrar.update()
    assert set(registrar.known) == {"node-0", "node-1", "node-2"}


Refusal = Callable[[dict[str, Any]], str]


@pytest.fixture
def refusal(federation: LocalFederation, tmp_path: Path) -> Refusal:
    """Return a function of a setup: why a node refuses it, or ""."""
    from fedshot.deploy.flower.worker import Worker

    worker = Worker("n", read_shards(federation.folder / "node-0" / "data"), tmp_path)

    def refused(setup: dict[str, Any]) -> str:
        head = {"setup": setup, "life": 1, "base": [-1, ""], "orders": [], "hello": True}
        return str(worker.handle(WireMessage(head)).head.get("refused", ""))

    return refused


def test_a_node_with_other_data_is_named(refusal: Refusal) -> None:
    """Another seed deals the clients other samples; their node says so and none takes part."""
    setup = Setup.of("0" * 32, setting({"seed": 1})).to_json()
    assert "another client split than the server's" in refusal(setup)
    assert "the server runs fedshot 0.0.0" in refusal(setup | {"fedshot": "0.0.0"})
    unknown = refusal(setup | {"draws": None})
    assert "the server (unknown versions) draws other random numbers" in unknown
    others = refusal(setup | {"draws": ["0" * 32, "numpy 9.9", "torch 9.9"]})
    known = "the server (numpy 9.9, torch 9.9) draws other random numbers than this node (numpy "
    assert known in others


def test_a_node_with_another_file_of_a_method_is_named(refusal: Refusal) -> None:
    """A method that is not the package's is the same at both, by the hash of its file."""
    setup = Setup.of("0" * 32, setting({"method": {"name": "synthetic"}})).to_json()
    assert setup["own"].startswith("registered_method.py ")
    assert not refusal(setup)
    words = "'synthetic' is other.py 00 on the server, and registered_method.py"
    assert words in refusal(setup | {"own": "other.py 00"})
    unknown = setup | {
        "settings": setup["settings"].replace("synthetic", "mine"),
        "own": "mine.py 00",
    }
    assert "'mine' is mine.py 00 on the server, and unknown on this node" in refusal(unknown)
    assert "setup.own is invalid" in refusal(setup | {"own": None})
