"""Signed keys of secure sums: nodes that know each other's public keys check the keys of clients.

The holder of a node gets the .pub and .json files of all nodes, as in the folder `nodes` of the
server, and compares them with the other holders. The server can then neither replace the keys from
which clients derive masks nor invent clients.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from fedshot.core.errors import ConfigError
from fedshot.deploy.flower.keys import load_public_keys
from fedshot.deploy.flower.node_registry import read_entries

_HALF = 32  # bytes of each of the two numbers of a signature on P-256
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Peers:
    """The nodes of a federation as one of them knows them.

    Args:
        key: the private key of this node.
        folder: the files NAME.pub and NAME.json of every node.

    Raises:
        ConfigError: the folder has no nodes, a file is missing or damaged, or two nodes have the
            same client.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, folder: Path) -> None:
        entries, keys = read_entries(folder), load_public_keys(folder)
        if not entries or entries.keys() != keys.keys():
            raise ConfigError(
                f"{folder} does not have a .pub and a .json file of every node. Copy both from the "
                "server's folder `nodes`, and compare the SHA-256 of each .pub with its holder."
            )
        self._key = key
        self._keys = {
            client: load_pem_public_key(keys[name])
            for name, entry in entries.items()
            for client in entry.clients
        }

    def sign(self, text: bytes) -> bytes:
        """Return the node's signature, 64 bytes."""
        numbers = utils.decode_dss_signature(self._key.sign(text, _ALGORITHM))
        return b"".join(number.to_bytes(_HALF) for number in numbers)

    def check(self, client: int, text: bytes, signature: bytes) -> None:
        """Raise ValueError unless the node of a client has signed a text."""
        if client not in self._keys:
            raise ValueError(f"no node of --peers has client {client}")
        r, s = (int.from_bytes(half) for half in (signature[:_HALF], signature[_HALF:]))
        try:
            self._keys[client].verify(utils.encode_dss_signature(r, s), text, _ALGORITHM)
        except InvalidSignature:
            raise ValueError(f"the keys of client {client} are not signed by its node") from None
