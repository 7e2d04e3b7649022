"""Private states on the disk of the host where the client lives, versioned by round.

One small file for each client and version: `000017/r000042-00.safetensors` is what client 17 kept
after exchange 0 of round 42. A client that is sampled reads its newest version; nothing is held
in memory between exchanges, so ten thousand clients cost what ten do.

When a round is sealed, just before the server's checkpoint of it is written, the new versions are
flushed, and an index says which version of every client belongs to the round, with its hash. The
checkpoint holds the hash of the index: after a resume a state that is missing, older, or damaged is
refused by the client's id.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from fedshot.core import storage
from fedshot.core.errors import CheckpointError

Version = tuple[int, int]  # round, number of the exchange in it
_NONE = (-1, -1)
_STATE = re.compile(r"r(\d{6,})-(\d{2,})\.safetensors")
_INDEX = re.compile(r"index-(\d{6,})\.safetensors")


class Index:
    """The newest version of every client up to one round: 16 bytes a client."""

    def __init__(self, versions: Tensor | None = None, shas: Tensor | None = None) -> None:
        self.versions = torch.full((0, 2), -1, dtype=torch.int32) if versions is None else versions
        self.shas = torch.zeros(0, dtype=torch.int64) if shas is None else shas

    def version(self, client: int) -> Version:
        """Return a client's version, (-1, -1) for none."""
        if client >= len(self.shas):
            return _NONE
        round, step = self.versions[client].tolist()
        return round, step

    def put(self, client: int, version: Version, sha: str) -> None:
        """Note a client's newest version."""
        short = client + 1 - len(self.shas)
        if short > 0:
            room = max(short, len(self.shas) // 2)
            self.versions = torch.cat([self.versions, torch.full((room, 2), -1).int()])
            self.shas = torch.cat([self.shas, torch.zeros(room, dtype=torch.int64)])
        self.versions[client] = torch.tensor(version, dtype=torch.int32)
        self.shas[client] = _short(sha)

    def fits(self, client: int, sha: str) -> bool:
        """Whether a state has the hash that was noted."""
        return int(self.shas[client]) == _short(sha)

    def write(self, path: Path) -> str:
        """Write the index; return its hash."""
        n = int((self.versions[:, 0] >= 0).nonzero().max()) + 1
        return storage.write(
            path, {"versions": self.versions[:n], "shas": self.shas[:n]}, sync=True
        )


class PrivateStore:
    """Versions of private trees below one folder, which is made when the first one is written.

    `holds` is what messages call a tree of a client.
    """

    def __init__(self, folder: Path, holds: str = "private state") -> None:
        self.folder, self.holds = folder, holds
        self._now = Index()
        self._sealed = -1
        self._opened: dict[int, Index] = {}
        self._pending: dict[tuple[int, Version], str] = {}
        self._lock = Lock()  # of `_pending`: clients are served by several threads

    def load(self, client: int, upto: Version) -> dict[str, Tensor] | None:
        """Return the leaves of the newest version that is not after `upto`; None if there is none.

        Raises:
            CheckpointError: that version is missing, damaged, or not the one that was sealed.
            KeyError: `upto` lies before the last sealed round and was not opened.
        """
        if upto[0] < 0:  # before training
            return None
        with self._lock:
            pending = [v for c, v in self._pending if c == client and v <= upto]
        if pending:
            return storage.read(self._path(client, max(pending)))[0]
        index = self._now if upto[0] >= self._sealed else self._opened[upto[0]]
        version = index.version(client)
        if version == _NONE:
            return None
        flat, _, sha = self._read(client, version)
        if not index.fits(client, sha):
            raise CheckpointError(
                f"the {self.holds} of client {client} at {self._path(client, version)} is not the "
                "one that this run sealed. Restore the folder from a copy, or start a new run."
            )
        return flat

    def save(self, client: int, version: Version, state: object) -> None:
        """Write a version; it counts from `seal` on."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        sha = storage.write(path, state, sync=False)
        with self._lock:
            self._pending[client, version] = sha

    def drop(self, client: int, version: Version) -> None:
        """Forget a version that the server did not accept."""
        if self._pending.pop((client, version), None) is not None:
            self._path(client, version).unlink()

    def void(self, round: int) -> None:
        """Forget every unsealed version of a round that does not count."""
        for client, version in [key for key in self._pending if key[1][0] == round]:
            self.drop(client, version)

    def seal(self, round: int, keep: Collection[int]) -> str:
        """Make the versions written so far the states of `round`; return the hash of its index.

        Args:
            round: the round that is complete.
            keep: sealed rounds that somebody may still return to; versions that neither they nor
                this round need are deleted.
        """
        written = sorted(self._pending.items())
        for (client, version), sha in written:
            storage.flush(self._path(client, version))
            self._now.put(client, version, sha)
        clients = sorted({client for (client, _), _ in written})
        for client in clients:
            storage.flush(self._folder(client))
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
        """Make the states of a sealed round readable; nothing is changed on the disk.

        Args:
            round: the round; -1 for before the first.
            sha: what `seal` returned for it.

        Raises CheckpointError when the index of the round is missing or not the one sealed.
        """
        if self.folder.is_symlink():
            raise CheckpointError(f"{self.folder} is a link; expected a folder of this run.")
        index = Index()
        if sha:
            index, found = self._read_index(round)
            if found != sha:
                raise CheckpointError(
                    f"{self._index(round)} is not the index that the checkpoint of round {round} "
                    "belongs to. Restore the folder from a copy, or start a new run."
                )
        self._opened[round] = index
        if round >= self._sealed:
            self._now, self._sealed = index, round

    def rewind(self, round: int, sha: str) -> None:
        """Go back to a sealed round: delete what came after it, and what was being written.

        Arguments and errors are those of `open`.
        """
        self._pending.clear()
        self._sealed = -1
        self.open(round, sha)
        for path in self.folder.glob("*/*"):
            state = _STATE.fullmatch(path.name)
            if path.name.endswith(storage.PARTIAL) or (state and int(state[1]) > round):
                path.unlink()
        for path in self.folder.glob("index-*"):
            index = _INDEX.fullmatch(path.name)
            if path.name.endswith(storage.PARTIAL) or (index and int(index[1]) > round):
                path.unlink()

    def recover(self) -> None:
        """Take up the versions that a process wrote after the last sealed round and then died.

        Whether they count is for the server to say, by `drop` and `seal`. What was being written is
        deleted.
        """
        for path in sorted(self.folder.glob("*/*")):
            state = _STATE.fullmatch(path.name)
            if state and int(state[1]) > self._sealed:
                version = (int(state[1]), int(state[2]))
                try:
                    self._pending[int(path.parent.name), version] = storage.read(path)[2]
                    continue
                except CheckpointError:
                    pass  # its last bytes did not reach the disk
            elif not path.name.endswith(storage.PARTIAL):
                continue
            path.unlink()

    def sealed_rounds(self) -> list[int]:
        """Return the sealed rounds of which there still is an index, in order."""
        found = (_INDEX.fullmatch(path.name) for path in self.folder.glob("index-*"))
        return sorted(int(name[1]) for name in found if name)

    def _prune(self, clients: Collection[int], keep: Collection[int]) -> None:
        """Delete indexes that nobody returns to, and the versions of `clients` that none needs."""
        for path in self.folder.glob("index-*"):
            found = _INDEX.fullmatch(path.name)
            if found and int(found[1]) not in {*keep, self._sealed}:
                path.unlink()
        kept = [self._read_index(r)[0] for r in keep if self._index(r).exists()]
        for client in clients:
            needed = {index.version(client) for index in (self._now, *kept)}
            for path in self._folder(client).iterdir():
                found = _STATE.fullmatch(path.name)
                if found and (int(found[1]), int(found[2])) not in needed:
                    path.unlink()

    def _read(self, client: int, version: Version) -> tuple[dict[str, Tensor], object, str]:
        try:
            return storage.read(self._path(client, version))
        except CheckpointError as error:
            raise CheckpointError(
                f"the {self.holds} of client {client} is lost: {error}. Restore the folder from a "
                "copy, or start a new run."
            ) from None

    def _read_index(self, round: int) -> tuple[Index, str]:
        try:
            flat, _, sha = storage.read(self._index(round))
        except CheckpointError as error:
            raise CheckpointError(
                f"the private states of round {round} are lost: {error}. Restore the folder from a "
                "copy, or start a new run."
            ) from None
        versions, shas = flat.get("versions"), flat.get("shas")
        if (
            versions is None
            or shas is None
            or (versions.dtype, shas.dtype) != (torch.int32, torch.int64)
            or (versions.shape, shas.shape) != ((len(versions), 2), (len(versions),))
        ):
            raise CheckpointError(
                f"{self._index(round)} is no index of private states. Restore the folder from a "
                "copy, or start a new run."
            )
        return Index(versions, shas), sha

    def _folder(self, client: int) -> Path:
        return self.folder / f"{client:06d}"

    def _path(self, client: int, version: Version) -> Path:
        return self._folder(client) / f"r{version[0]:06d}-{version[1]:02d}.safetensors"

    def _index(self, round: int) -> Path:
        return self.folder / f"index-{round:06d}.safetensors"


def _short(sha: str) -> int:
    """Return the first 8 bytes of a hash as a signed number."""
    return int.from_bytes(bytes.fromhex(sha[:16]), "big", signed=True)
