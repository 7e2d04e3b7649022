"""A server's folder: its certificates, the public keys of its nodes, its address and its token.

ca.pem ca.key server.pem server.key     made by `fedshot flower keys`; ca.pem goes to the nodes
nodes/hospital-a.pub hospital-a.json    written by `fedshot flower keys --admit`; see admission
server.json token server.log            written by the server
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import socket
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.records import Whole
from fedshot.deploy.flower.codec import Limits

CA, CERTIFICATE, KEY = "ca.pem", "server.pem", "server.key"
_TOKEN = re.compile(rb"[0-9a-f]{64}")


class _Address(TypedDict):
    """What server.json holds."""

    host: str
    port: Whole
    secure: bool
    message: Whole


@dataclass(frozen=True)
class ServerFolder:
    """The folder of a server."""

    folder: Path

    @property
    def nodes(self) -> Path:
        """Where the public keys of the nodes lie."""
        return self.folder / "nodes"

    @property
    def ca(self) -> Path:
        """The certificate that nodes trust."""
        return self.folder / CA

    def token(self) -> str:
        """Return the token of this server, made at the first call."""
        path = self.folder / "token"
        if not path.exists():
            own_folder(self.folder)
            write_secret(path, secrets.token_hex(32).encode())
        found = path.read_bytes()
        if not _TOKEN.fullmatch(found):
            raise ConfigError(f"{path} is damaged. Remove it, and start the server anew.")
        return found.decode()

    def write_address(self, host: str, port: int, *, secure: bool, limits: Limits) -> None:
        """Note how a run on this machine reaches the server."""
        reached = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        found = {"host": reached, "port": port, "secure": secure, "message": limits.message}
        storage.write_bytes(self.folder / "server.json", json.dumps(found).encode(), sync=False)

    def address(self) -> tuple[str, bool, Limits]:
        """Return host and port, whether it speaks TLS, and its limits.

        Raises ConfigError when no server was started with this folder.
        """
        path = self.folder / "server.json"
        if not path.exists():
            raise ConfigError(
                f"{self.folder} is no folder of a server: it has no server.json. Start the server "
                f"with `fedshot flower server --folder {self.folder}`."
            )
        fix = "Start the server again, which writes it anew"
        try:
            found = records.read(path, _Address, fix)
            address = joined(found["host"], found["port"])
            split(address)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        except ConfigError as error:
            raise ConfigError(f"{path} is damaged ({error}). {fix}.") from None
        return address, bool(found["secure"]), Limits(message=int(found["message"]))

    def command(self, host: str, port: int, *, secure: bool, limits: Limits) -> list[str]:
        """Return the words that start the SuperLink.

        Raises ConfigError when the certificates are not there.
        """
        words = [sys.executable, "-P", "-m", "fedshot.deploy.flower.superlink"]
        words += [str(limits.message)]
        words += ["--host", host, "--port", str(port), "--isolation", "process"]
        # No --database, so it is kept in memory: what clients send is on no disk, nodes are
        # registered anew at every start, and no run of an earlier life is left hanging.
        words += ["--disable-runtime-dependency-installation"]
        if not secure:
            return [*words, "--insecure"]
        for name in (CA, CERTIFICATE, KEY):
            if not (self.folder / name).exists():
                raise ConfigError(
                    f"{self.folder / name} does not exist. Make it with `fedshot flower keys "
                    f"--server {host} --folder {self.folder}`."
                )
        words += ["--enable-supernode-auth", "--ssl-ca-certfile", str(self.ca)]
        words += ["--ssl-certfile", str(self.folder / CERTIFICATE)]
        return [*words, "--ssl-keyfile", str(self.folder / KEY)]


def joined(host: str, port: int) -> str:
    """Return host:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return host and port of host:port. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no address; expected host:port, such as 10.0.0.1:9092.")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_secure(host: str, *, secure: bool, insecure: bool) -> None:
    """Raise ConfigError for plain text beyond this machine that nobody asked for."""
    if not secure and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} is not this machine, and without TLS and node keys anybody on the way could "
            "read and change what is sent. Make them with `fedshot flower keys`, and give a node "
            "--ca and --key; or say --insecure where the network itself is safe."
        )


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Raise ConfigError unless a server can listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in found:  # the server listens on all of them
            try:
                probe = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # a kind of address that this machine does not have
            with probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"no server can listen on {joined(host, port)}: {why}. Choose another --port, or stop "
            "what listens there; --host is an address of this machine."
        ) from None


def told_open(path: Path) -> str:
    """Return a notice for a secret that others on this machine may read; "" for none."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if os.name == "nt" or not mode & 0o077:
        return ""
    return f"{path} can be read by others (mode {mode:04o}). Keep it to yourself: chmod 600 {path}"


def own_folder(path: Path) -> None:
    """Make a folder that its owner alone can look into; one that is there is left as it is."""
    if not path.is_dir():
        path.mkdir(parents=True)
        path.chmod(0o700)


def write_secret(path: Path, data: bytes) -> None:
    """Write what nobody but its owner may read, not even for an instant; whole, or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(partial, flags, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
