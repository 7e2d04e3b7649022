"""A server's folder: its certificates, the public keys of its nodes, its address and its token.

ca.pem ca.key server.pem server.key     `fedshot flower keys` makes them; nodes need ca.pem
nodes/hospital-a.pub hospital-a.json    `fedshot flower keys --admit` makes them (`node_registry`)
server.json token server.log            the server writes them
"""

from __future__ import annotations

import errno
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
from fedshot.core.serialised import Limits
from fedshot.core.text import natural, typed

CA, CERTIFICATE, KEY = "ca.pem", "server.pem", "server.key"
_TOKEN = re.compile(rb"[0-9a-f]{64}")
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)  # this machine has no IPv6, or no IPv4


class _Address(TypedDict):
    """Content of server.json."""

    host: str
    port: Whole
    secure: bool
    message: Whole


@dataclass(frozen=True)
class ServerFolder:
    """A server's folder, with the files listed in this module's docstring."""

    folder: Path

    @property
    def nodes(self) -> Path:
        """Folder of the nodes' public keys."""
        return self.folder / "nodes"

    @property
    def ca(self) -> Path:
        """File of the authority's certificate, which nodes trust."""
        return self.folder / CA

    def token(self) -> str:
        """Return the token of this server, created at the first call."""
        path = self.folder / "token"
        if not path.exists():
            make_private_folder(self.folder)
            write_secret(path, secrets.token_hex(32).encode())
        found = path.read_bytes()
        if not _TOKEN.fullmatch(found):
            raise ConfigError(f"{path} is damaged. Remove it, and restart the server.")
        return found.decode()

    def write_address(self, host: str, port: int, *, secure: bool, limits: Limits) -> None:
        """Record the address at which runs on this machine reach the server."""
        local = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        found = {"host": local, "port": port, "secure": secure, "message": limits.message}
        storage.write_bytes(self.folder / "server.json", json.dumps(found).encode(), sync=False)

    def address(self) -> tuple[str, bool, Limits]:
        """Return the address, whether the server uses TLS, and its limits on messages.

        Raises ConfigError if no server was started with this folder.
        """
        path = self.folder / "server.json"
        if not path.exists():
            raise ConfigError(
                f"{self.folder} is not a server folder: it has no server.json. Start the server "
                f"with `fedshot flower server --folder {typed(self.folder)}`."
            )
        fix = "Restart the server, which writes it again"
        try:
            found = records.read(path, _Address, fix)
            address = join_address(found["host"], found["port"])
            split_address(address)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        except ConfigError as error:
            raise ConfigError(f"{path} is damaged ({error}). {fix}.") from None
        return address, bool(found["secure"]), Limits(message=int(found["message"]))

    def command(self, host: str, port: int, *, secure: bool, limits: Limits) -> list[str]:
        """Return the command line of the SuperLink. Raises ConfigError for missing certificates."""
        # Without --database the SuperLink keeps its state in memory: clients' data are never
        # written to disk, and runs of an earlier process do not stay pending.
        command = [
            sys.executable, "-P", "-m", "fedshot.deploy.flower.superlink", str(limits.message),
            "--host", host, "--port", str(port), "--isolation", "process",
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        if not secure:
            return [*command, "--insecure"]
        for name in (CA, CERTIFICATE, KEY):
            if not (self.folder / name).exists():
                raise ConfigError(
                    f"{self.folder / name} does not exist. Make it with `fedshot flower keys "
                    f"--server {host} --folder {typed(self.folder)}`; or use --insecure, on "
                    "loopback or "
                    "if the network itself is safe."
                )
        return [
            *command, "--enable-supernode-auth", "--ssl-ca-certfile", str(self.ca),
            "--ssl-certfile", str(self.folder / CERTIFICATE),
            "--ssl-keyfile", str(self.folder / KEY),
        ]  # fmt: skip


def join_address(host: str, port: int) -> str:
    """Return host:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of host:port. Raises ConfigError if it is invalid."""
    host, _, digits = address.rpartition(":")
    port = natural(digits)
    if not host or "/" in host or port is None or not 0 < port < 65536:
        raise ConfigError(
            f"{address!r} is not an address; expected host:port, such as 10.0.0.1:9092."
        )
    return host.strip("[]"), port


def is_loopback(host: str) -> bool:
    """Whether a host is the loopback interface of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_secure(host: str, *, secure: bool, insecure: bool) -> None:
    """Raise ConfigError for plain text to or from other machines, unless --insecure is given."""
    if not secure and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} is not this machine, and without TLS and node keys anybody on the network "
            "could read and change messages. Make keys with `fedshot flower keys`, and give the "
            "node --ca and --key; or use --insecure if the network itself is safe."
        )


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int, option: str = "--port") -> None:
    """Raise ConfigError unless a server can listen on this address, whose port `option` sets."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in found:  # the server listens on all these addresses
            try:
                socket.create_server(address, family=family).close()
            except OSError as error:
                if error.errno not in _NO_FAMILY:
                    # Without the address, which `create_server` adds to the text.
                    raise OSError(error.errno, os.strerror(error.errno or 0)) from None
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"no server can listen on {join_address(host, port)}: {why}. Choose another "
            f"{option}, or stop the program that listens there; the host must be an address of "
            "this machine."
        ) from None


def exposure_notice(path: Path) -> str:
    """Return a notice if other users of this machine can read a secret file, else ""."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if os.name == "nt" or not mode & 0o077:
        return ""
    return f"{path} can be read by other users (mode {mode:04o}). Restrict it: chmod 600 {path}"


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can read; an existing folder stays as it is."""
    if not path.is_dir():
        path.mkdir(parents=True)
        path.chmod(0o700)


def write_secret(path: Path, data: bytes) -> None:
    """Write a file atomically; at no time can anybody but its owner read it."""
    storage.write_bytes(path, data, sync=True, mode=0o600)
