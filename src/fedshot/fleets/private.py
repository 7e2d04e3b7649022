"""Private states of clients, versioned by round, on the disk of the machine that runs the clients.

Each client and version has one file: `000017/r000042-00.safetensors` is the state of client 17
after exchange 0 of round 42. A sampled client reads its newest version. No state stays in memory
between exchanges, so memory does not grow with the number of clients.

Just before the server writes a round's checkpoint, `seal` commits the round: it flushes the new
versions to disk, and writes an index with the version and hash of every client's state. The
checkpoint holds the hash of the index, so a resumed run detects missing, old or damaged states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from fedshot.core import storage
from fedshot.core.errors import CheckpointError

Version = tuple[int, int]  # round, and number of the exchange in the round
_NONE = (-1, -1)
_FIX = "Restore the folder from a copy, or start a new run."
_STATE = re.compile(r"r(\d{6,})-(\d{2,})\.safetensors")
_INDEX = re.compile(r"index-(\d{6,})\.safetensors")


@dataclass(eq=False)
class Index:
    """Version and hash of every client's newest state up to one round.

    It has an entry of 24 bytes for each client that has a state, in the order of the clients.
    """

    clients: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    versions: Tensor = field(default_factory=lambda: torch.zeros((0, 2), dtype=torch.int32))
    shas: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def version(self, client: int) -> Version:
        """Return the version of a client's state; (-1, -1) if it has none."""
        at = self._at(client)
        if at == len(self.clients) or int(self.clients[at]) != client:
            return _NONE
        round, step = self.versions[at].tolist()
        return round, step

    def versions_of(self, clients: Sequence[int]) -> list[Version]:
        """Return the version of each client's state; (-1, -1) for a client that has none."""
        wanted = torch.tensor(clients, dtype=torch.int64)
        has = torch.isin(wanted, self.clients)
        found = torch.full((len(wanted), 2), -1, dtype=torch.int32)
        found[has] = self.versions[torch.searchsorted(self.clients, wanted[has])]
        return [(round, step) for round, step in found.tolist()]

    def put(self, newest: Mapping[int, tuple[Version, str]]) -> None:
        """Set the version and hash of some clients' newest states."""
        clients = torch.tensor(sorted(newest), dtype=torch.int64)
        versions = torch.tensor([newest[c][0] for c in clients.tolist()], dtype=torch.int32)
        shas = torch.tensor([_short(newest[c][1]) for c in clients.tolist()], dtype=torch.int64)
        others = ~torch.isin(self.clients, clients)
        self.clients, order = torch.cat([self.clients[others], clients]).sort()
        self.versions = torch.cat([self.versions[others], versions.reshape(-1, 2)])[order]
        self.shas = torch.cat([self.shas[others], shas])[order]

    def fits(self, client: int, sha: str) -> bool:
        """Return whether `sha` is the recorded hash of a client's state."""
        return int(self.shas[self._at(client)]) == _short(sha)

    def write(self, path: Path) -> str:
        """Write the index of the clients' newest states; return its hash."""
        content = {"clients": self.clients, "versions": self.versions, "shas": self.shas}
        return storage.write(path, content, sync=True)

    def _at(self, client: int) -> int:
        """Return the position of a client's entry, or where it would be."""
        return int(torch.searchsorted(self.clients, client))


class PrivateStore:
    """Versions of private states in a folder, which is created at the first write.

    `holds` is what error messages call a state, such as "private state".
    """

    def __init__(self, folder: Path, holds: str = "private state") -> None:
        self.folder, self.holds = folder, holds
        self._now = Index()
        self._sealed = -1
        self._opened: dict[int, Index] = {}
        self._pending: dict[int, dict[Version, str]] = {}  # client -> version -> hash
        self._lock = Lock()  # guards `_pending`, since several threads serve clients

    def load(self, client: int, upto: Version) -> dict[str, Tensor] | None:
        """Return the leaves of a client's newest state up to version `upto`; None if there is none.

        Raises:
            CheckpointError: the version is missing, damaged, or does not have the committed hash.
            KeyError: `upto` is in a round before the last committed round, and `open` was not
                called for it.
        """
        if upto[0] < 0:  # before training
            return None
        with self._lock:
            pending = [v for v in self._pending.get(client, ()) if v <= upto]
        if pending:
            return storage.read(self._path(client, max(pending)))[0]
        index = self._now if upto[0] >= self._sealed else self._opened[upto[0]]
        version = index.version(client)
        if version == _NONE:
            return None
        flat, _, sha = self._read(client, version)
        if not index.fits(client, sha):
            raise CheckpointError(
                f"the {self.holds} of client {client} at {self._path(client, version)} does not "
                f"have the hash that this run recorded. {_FIX}"
            )
        return flat

    def save(self, client: int, version: Version, state: object) -> None:
        """Write a version of a client's state; `seal` commits it."""
        path = self._path(client, version)
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        sha = storage.write(path, state, sync=False)
        with self._lock:
            self._pending.setdefault(client, {})[version] = sha

    def drop(self, client: int, version: Version) -> None:
        """Delete a version of a client's state that the server did not accept."""
        if self._pending.get(client, {}).pop(version, None) is not None:
            self._path(client, version).unlink()

    def void(self, round: int) -> None:
        """Delete the versions of an uncommitted round, which the server has discarded."""
        for client, version in [key for key, _ in self._written() if key[1][0] == round]:
            self.drop(client, version)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Commit a round: make all versions written so far permanent; return its index's hash.

        Args:
            round: the round that is complete.
            keep: earlier committed rounds that stay readable. Versions that are not needed for
                these rounds or for `round` are deleted.
        """
        written = self._written()
        self._now.put({client: (version, sha) for (client, version), sha in written})
        clients = sorted({client for (client, _), _ in written})
        files = [self._path(client, version) for (client, version), _ in written]
        storage.flush_all([*files, *map(self._folder, clients)], self.folder)
        self._sealed = round
        self._opened.clear()
        if not len(self._now.shas):
            return ""
        sha = self._now.write(self._index(round))
        storage.flush(self.folder)
        storage.flush(self.folder.parent)
        self._pending.clear()
        self._prune(clients, {r for r in keep if r != round})
        return sha

    def open(self, round: int, sha: str) -> None:
        """Make the states of a committed round readable, without changing anything on the disk.

        Args:
            round: the round; -1 for the initial state.
            sha: the hash that `seal` returned for the round.

        Raises CheckpointError if the index of the round is missing or does not have this hash.
        """
        if self.folder.is_symlink():
            raise CheckpointError(f"{self.folder} is a link; expected a folder of this run.")
        index = Index()
        if sha:
            index, found = self._read_index(round)
            if found != sha:
                raise CheckpointError(
                    f"{self._index(round)} does not have the hash in the checkpoint of round "
                    f"{round}. {_FIX}"
                )
        self._opened[round] = index
        if round >= self._sealed:
            self._now, self._sealed = index, round

    def rewind(self, round: int, sha: str) -> None:
        """Roll back to a committed round: delete later versions and partial files.

        Arguments and errors are those of `open`.
        """
        self._pending.clear()
        self._sealed = -1
        self.open(round, sha)
        for pattern, name in (("*/*", _STATE), ("index-*", _INDEX)):
            for path in self.folder.glob(pattern):
                found = name.fullmatch(path.name)
                if path.name.endswith(storage.PARTIAL) or (found and int(found[1]) > round):
                    path.unlink()

    def recover(self) -> None:
        """Register the versions that a killed process wrote after the last committed round.

        The server decides later whether to commit or drop them. Partial files are deleted.
        """
        for path in sorted(self.folder.glob("*/*")):
            state = _STATE.fullmatch(path.name)
            if state and int(state[1]) > self._sealed:
                version = (int(state[1]), int(state[2]))
                try:
                    sha = storage.read(path)[2]
                    self._pending.setdefault(int(path.parent.name), {})[version] = sha
                    continue
                except CheckpointError:
                    pass  # the file is incomplete
            elif not path.name.endswith(storage.PARTIAL):
                continue
            path.unlink()

    def sealed_rounds(self) -> list[int]:
        """Return the committed rounds that still have an index, in order."""
        found = (_INDEX.fullmatch(path.name) for path in self.folder.glob("index-*"))
        return sorted(int(name[1]) for name in found if name)

    def _written(self) -> list[tuple[tuple[int, Version], str]]:
        """Return ((client, version), hash) of all uncommitted versions, in order."""
        return sorted(
            ((client, version), sha)
            for client, versions in self._pending.items()
            for version, sha in versions.items()
        )

    def _prune(self, clients: Sequence[int], keep: Collection[int]) -> None:
        """Delete indexes of rounds not kept, and versions of `clients` that no index needs."""
        for path in self.folder.glob("index-*"):
            found = _INDEX.fullmatch(path.name)
            if found and int(found[1]) not in {*keep, self._sealed}:
                path.unlink()
        kept = [self._read_index(r)[0] for r in keep if self._index(r).exists()]
        versions = (index.versions_of(clients) for index in (self._now, *kept))
        for client, *needed in zip(clients, *versions, strict=True):
            for path in self._folder(client).iterdir():
                found = _STATE.fullmatch(path.name)
                if found and (int(found[1]), int(found[2])) not in needed:
                    path.unlink()

    def _read(self, client: int, version: Version) -> tuple[dict[str, Tensor], object, str]:
        try:
            return storage.read(self._path(client, version))
        except CheckpointError as error:
            raise CheckpointError(
                f"the {self.holds} of client {client} cannot be read: {error}. {_FIX}"
            ) from None

    def _read_index(self, round: int) -> tuple[Index, str]:
        try:
            flat, _, sha = storage.read(self._index(round))
        except CheckpointError as error:
            raise CheckpointError(
                f"the index of the private states of round {round} cannot be read: {error}. {_FIX}"
            ) from None
        versions, shas = flat.get("versions"), flat.get("shas")
        clients = flat.get("clients")
        if (
            clients is None
            or versions is None
            or shas is None
            or (clients.dtype, versions.dtype, shas.dtype)
            != (torch.int64, torch.int32, torch.int64)
            or (clients.shape, versions.shape, shas.shape)
            != ((len(shas),), (len(shas), 2), (len(shas),))
        ):
            raise CheckpointError(f"{self._index(round)} is not an index of private states. {_FIX}")
        return Index(clients, versions, shas), sha

    def _folder(self, client: int) -> Path:
        return self.folder / f"{client:06d}"

    def _path(self, client: int, version: Version) -> Path:
        return self._folder(client) / f"r{version[0]:06d}-{version[1]:02d}.safetensors"

    def _index(self, round: int) -> Path:
        return self.folder / f"index-{round:06d}.safetensors"


def _short(sha: str) -> int:
    """Return the first 8 bytes of a hash as a signed integer."""
    return int.from_bytes(bytes.fromhex(sha[:16]), "big", signed=True)
