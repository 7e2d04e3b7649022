"""Keys: a certificate authority, the server's certificate, and a key pair for each node.

A node authenticates the server by its certificate, which is signed by the authority whose ca.pem
was copied to the node. The server authenticates a node by its public key, which was copied to the
server. Private keys stay on the machine that made them and are readable by their owner only.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedshot.core.errors import ConfigError
from fedshot.core.serialised import CodecError
from fedshot.deploy.flower.node_registry import read_entries
from fedshot.deploy.flower.server_folder import (
    CA,
    CERTIFICATE,
    KEY,
    make_private_folder,
    write_secret,
)

CA_KEY = "ca.key"
_CURVE = ec.SECP256R1()  # every request is signed, and P-256 is ten times faster than P-384
_HALF = 32  # bytes of each of the two numbers of a signature on P-256
_ALGORITHM = ec.ECDSA(hashes.SHA256())
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_MAX_PROOF = 1 << 14  # characters of a certificate and a signature
_BACKDATE = datetime.timedelta(hours=1)  # tolerates clocks that are behind


def make_server_keys(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Make a key and a certificate for the server, and an authority if the folder has none.

    Args:
        folder: where ca.pem, ca.key, server.pem and server.key are written.
        hosts: names and addresses under which nodes reach the server.
        days: validity of the server's certificate; the authority's certificate is valid ten times
            as long.

    Raises ConfigError for an invalid host name, or if the authority's key is missing.
    """
    names = [_name(host) for host in hosts]
    make_private_folder(folder)
    if not (folder / CA).exists():
        _make_authority(folder, 10 * days)
    if not (folder / CA_KEY).exists():
        raise ConfigError(
            f"{folder / CA_KEY} does not exist, and a new certificate must be signed with it. "
            "Bring it back from where you keep it, and remove it again afterwards."
        )
    authority, signing, key = load_authority(folder / CA), _private(folder / CA_KEY), new_key()
    made = _certificate("fedshot server", key, days, authority.subject, signing, [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), False),
    ])  # fmt: skip
    # Both new files are on disk before either old file is replaced: they change together.
    partial = folder / f"{CERTIFICATE}.partial"
    partial.write_bytes(made)
    _write_private(folder / KEY, key)
    partial.replace(folder / CERTIFICATE)


def load_authority(path: Path) -> x509.Certificate:
    """Read the certificate of an authority. Raises ConfigError if it is invalid."""
    try:
        data = path.read_bytes()
        data.decode("ascii")  # TLS libraries accept only ASCII
        return x509.load_pem_x509_certificate(data)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a certificate: {error}. Copy ca.pem from the server's folder, where "
            "`fedshot flower keys` made it."
        ) from None


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, as `sha256sum` prints it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def new_key() -> ec.EllipticCurvePrivateKey:
    """Generate a private key."""
    return ec.generate_private_key(_CURVE)


def make_node_key(path: Path) -> Path:
    """Make a node's key pair; return the file of the public key.

    Raises ConfigError if one of the files exists: the server identifies the node by its key.
    """
    if path.exists():
        raise ConfigError(f"{path} exists. Keep it, or move it away to make another.")
    public = path.with_suffix(".pub")
    if public == path:
        raise ConfigError(f"{path} is the name of the public key. Name the key {path.stem}.key.")
    if public.exists():
        raise ConfigError(
            f"{public} exists and belongs to another key. Move it away, or choose another name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    key = new_key()
    _write_private(path, key)
    public.write_bytes(public_bytes(key.public_key()))
    return public


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key. Raises ConfigError if it is invalid."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Make it with `fedshot flower keys --node`.")
    return _private(path)


def load_public_keys(folder: Path) -> dict[str, bytes]:
    """Return the public keys in the .pub files of a folder, as PEM, by node name (file stem)."""
    return {path.stem: load_public_key(path) for path in sorted(folder.glob("*.pub"))}


def load_public_key(path: Path) -> bytes:
    """Read a public key as PEM. Raises ConfigError if it is invalid."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a public key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is not an elliptic-curve key; make it with fedshot.")
    return public_bytes(key)


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


class Signer:
    """Signs a server's messages with the key of its certificate.

    Raises ConfigError for a server folder with an invalid key or certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._key = _private(folder / KEY)
        try:
            self._certificate = (folder / CERTIFICATE).read_text(encoding="ascii")
            x509.load_pem_x509_certificate(self._certificate.encode())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder / CERTIFICATE} is not a certificate: {error}. Make it again with "
                "`fedshot flower keys --server`."
            ) from None

    def sign(self, digest: bytes) -> str:
        """Return the proof of origin for a message with this hash: certificate and signature."""
        signature = self._key.sign(digest, _ALGORITHM)
        return json.dumps({"certificate": self._certificate, "signature": signature.hex()})


class Verifier:
    """Verifies the proofs that `Signer` makes, against the certificate of an authority."""

    def __init__(self, ca: Path) -> None:
        self._authority = load_authority(ca)

    def check(self, digest: bytes, proof: str) -> None:
        """Raise CodecError unless a server certified by the authority has signed this hash."""
        try:
            found = json.loads(proof[:_MAX_PROOF])
            certificate = x509.load_pem_x509_certificate(found["certificate"].encode("ascii"))
            certificate.verify_directly_issued_by(self._authority)
            uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            now = datetime.datetime.now(datetime.UTC)
            good = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
            key = certificate.public_key()
            if not (good and ExtendedKeyUsageOID.SERVER_AUTH in uses):
                raise ValueError("the certificate is not valid")
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise TypeError("it is not an elliptic-curve key")
            key.verify(bytes.fromhex(found["signature"]), digest, _ALGORITHM)
        except (
            ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature,
            UnsupportedAlgorithm, x509.ExtensionNotFound,
        ):  # fmt: skip
            raise CodecError("it is not signed by the server") from None


class Peers:
    """The nodes of a federation, as one of them knows them, for signed keys of secure sums.

    The holder of a node gets the .pub and .json files of all nodes, as in the folder `nodes` of the
    server, and compares them with the other holders. The server can then neither replace the keys
    from which clients derive masks nor invent clients.

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
            client: serialization.load_pem_public_key(keys[name])
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


def _make_authority(folder: Path, days: int) -> None:
    name, key = "fedshot authority", new_key()
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    made = _certificate(name, key, days, _subject(name), key, [
        (x509.BasicConstraints(ca=True, path_length=0), True), (usage, True),
    ])  # fmt: skip
    _write_private(folder / CA_KEY, key)
    (folder / CA).write_bytes(made)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, days: int, issuer: x509.Name,
    signing: ec.EllipticCurvePrivateKey, extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> bytes:  # fmt: skip
    """Return a certificate for `key` as PEM; `extensions` are pairs (extension, is critical)."""
    now, public = datetime.datetime.now(datetime.UTC), key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"--server {host!r} is not a host name or address. Leave the port out, and write "
                "a name with non-ASCII letters as in DNS (xn--...)."
            ) from None
        return x509.DNSName(host)


def _private(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not an elliptic-curve key; make it with fedshot.")
    return key


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(path, data)
