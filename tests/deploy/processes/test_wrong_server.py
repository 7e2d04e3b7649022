"""What a server and a node say that were started with something of another's."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fedshot.core.errors import BusyError, ConfigError

from .local_federation import LocalFederation, own_port


def serve(folder: Path, host: str, port: int) -> int:
    """Run the command of a server, in this process."""
    from fedshot.cli import flower

    options = argparse.Namespace(
        folder=folder, host=host, port=port, insecure=False, most_mb=1, metrics=None
    )
    return flower.server(options)


def test_a_second_server_leaves_the_first_ones_address_as_it_is(
    federation: LocalFederation,
) -> None:
    from fedshot.core.locks import only_one
    from fedshot.deploy.flower.server_folder import split_address

    host, port = split_address(federation.address())
    written = (federation.home.folder / "server.json").read_bytes()
    with pytest.raises(ConfigError, match=f"no server can listen on {host}:{port}"):
        serve(federation.home.folder, host, port)
    with (
        only_one(federation.home.folder / ".lock", "runs a server"),
        pytest.raises(BusyError, match="another process runs a server in"),
    ):
        serve(federation.home.folder, host, own_port())
    for strange in ("192.0.2.1", "127.0.0..1", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match="the host must be an address of this machine"):
            serve(federation.home.folder, strange, own_port())
    assert (federation.home.folder / "server.json").read_bytes() == written


def test_a_certificate_of_another_host_is_named_at_once(tmp_path: Path) -> None:
    """The server comes up, and the operator, who asks it by its address, does not trust it."""
    from fedshot.deploy.flower.keys import make_server_keys

    make_server_keys(tmp_path, ["example.org"])
    (tmp_path / "nodes").mkdir()
    with pytest.raises(ConfigError, match=r"certificate of the server at 127.0.0.1:\d+ is not tr"):
        serve(tmp_path, "127.0.0.1", own_port())


def test_a_node_names_what_is_no_certificate(federation: LocalFederation) -> None:
    from fedshot.deploy.flower.keys import load_authority

    with pytest.raises(ConfigError, match=r"node-0\.pub is not a certificate"):
        load_authority(federation.home.nodes / "node-0.pub")


def test_a_node_with_tls_names_a_server_without(tmp_path: Path) -> None:
    from fedshot.core.serialised import LIMITS
    from fedshot.deploy.flower.connection import Connection
    from fedshot.deploy.flower.keys import make_server_keys, new_key
    from fedshot.deploy.flower.local import start_server
    from fedshot.deploy.flower.processes import Children
    from fedshot.deploy.flower.server_folder import CA, ServerFolder, join_address

    make_server_keys(tmp_path / "keys", ["127.0.0.1"])
    home, port = ServerFolder(tmp_path / "plain"), own_port()
    with Children() as children:
        log = tmp_path / "server.log"
        start_server(children, home, "127.0.0.1", port, LIMITS, log=log, secure=False)
        line = Connection(join_address("127.0.0.1", port), new_key(), tmp_path / "keys" / CA,
                    tmp_path / "node.json", LIMITS)  # fmt: skip
        try:
            with pytest.raises(ConfigError, match="the server does not speak TLS"):
                line.open()
        finally:
            line.close()
