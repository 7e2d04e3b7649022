"""Private states on the disk of the host where the client lives, versioned by round.

One small file for each client and version: `000017/r000042-00.safetensors` is what client 17 kept
after exchange 0 of round 42. A client that is sampled reads its newest version; nothing is held
in memory between exchanges, so ten thousand clients cost what ten do. A version is flushed when
its round is sealed, just before the server's checkpoint of that round is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedshot import storage
from fedshot.tree import Tree

Version = tuple[int, int]


class PrivateStore:
    """Versions of private trees below one folder.

    Args:
        folder: made when the first state is written.
        digest: chain over everything sealed so far, to be continued after a resume.
    """

    def __init__(self, folder: Path, digest: str = "") -> None:
        self.folder, self.digest = folder, digest
        self._pending: dict[tuple[int, Version], str] = {}

    def load(self, client: int, upto: Version) -> dict[str, Tensor] | None:
        """Return the leaves of the newest version that is not after `upto`; None if there is none.

        Raises CheckpointError when that version is damaged.
        """
        held = [v for v in self._versions(client) if v <= upto]
        if not held:
            return None
        return storage.read(self._path(client, max(held)))[0]

    def save(self, client: int, version: Version, state: Tree) -> None:
        """Write a version; it counts from `seal` on."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._pending[client, version] = storage.write(path, state, sync=False)

    def drop(self, client: int, version: Version) -> None:
        """Forget a version that the server did not accept."""
        if self._pending.pop((client, version), None) is not None:
            self._path(client, version).unlink()

    def void(self, round: int) -> None:
        """Forget every version of a round that does not count."""
        for client, version in [key for key in self._pending if key[1][0] == round]:
            self.drop(client, version)

    def seal(self, keep: Collection[int]) -> str:
        """Flush the versions written since the last seal, and return the chained digest.

        Args:
            keep: rounds that somebody may still return to (checkpoints, the best round). Of the
                clients just written, versions that none of them needs are deleted.
        """
        written = sorted(self._pending.items())
        for (client, version), _ in written:
            storage.flush(self._path(client, version))
        for client in sorted({client for (client, _), _ in written}):
            storage.flush(self._folder(client))
            self._prune(client, keep)
        if written:
            entry = json.dumps([self.digest, [[c, v, sha] for (c, v), sha in written]])
            self.digest = hashlib.sha256(entry.encode()).hexdigest()
        self._pending.clear()
        return self.digest

    def rewind(self, round: int) -> None:
        """Delete every version after `round`, and whatever was being written."""
        self._pending.clear()
        for path in self.folder.glob("*/r*"):
            if path.name.endswith(storage.PARTIAL) or _version(path)[0] > round:
                path.unlink()

    def _prune(self, client: int, keep: Collection[int]) -> None:
        versions = self._versions(client)
        needed = {max(versions)} | {
            max(v for v in versions if v[0] <= round)
            for round in keep
            if any(v[0] <= round for v in versions)
        }
        for version in set(versions) - needed:
            self._path(client, version).unlink()

    def _versions(self, client: int) -> list[Version]:
        found = self._folder(client).glob("r*.safetensors")
        return [_version(path) for path in found]

    def _folder(self, client: int) -> Path:
        return self.folder / f"{client:06d}"

    def _path(self, client: int, version: Version) -> Path:
        return self._folder(client) / f"r{version[0]:06d}-{version[1]:02d}.safetensors"


def _version(path: Path) -> Version:
    round, step = path.name[1:].split(".")[0].split("-")
    return int(round), int(step)
