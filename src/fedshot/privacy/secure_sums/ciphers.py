"""The ciphers of secure sums: X25519, HKDF with SHA-256, AES-256-CTR and ChaCha20-Poly1305.

Every key is derived for one purpose in one exchange (`context`), and used once. So a cipher's
nonce can be zero.
"""

from __future__ import annotations

import json

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
TAG_BYTES = 16  # by which an encrypted text is longer
_NO_NONCE = bytes(12)


def derive(secret: bytes, purpose: str, *context: str | int) -> bytes:
    """Return a key of 32 bytes, derived from `secret` for one purpose."""
    info = json.dumps(["fedshot secure sums", purpose, *context]).encode()
    key: bytes = HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(secret)
    return key


def private_key(seed: bytes, purpose: str, *context: str | int) -> X25519PrivateKey:
    """Return the private key that belongs to a seed."""
    return X25519PrivateKey.from_private_bytes(derive(seed, purpose, *context))


def public_key(private: X25519PrivateKey) -> bytes:
    """Return the public key of a private key, 32 bytes."""
    public: bytes = private.public_key().public_bytes_raw()
    return public


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret that two parties share. Raises ValueError for a key of low order."""
    secret: bytes = private.exchange(X25519PublicKey.from_public_bytes(public))
    return secret


def stream(key: bytes, n: int) -> bytes:
    """Return n pseudo-random bytes."""
    found: bytes = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(n))
    return found


def encrypt(key: bytes, text: bytes) -> bytes:
    """Encrypt a text and protect it against changes."""
    found: bytes = ChaCha20Poly1305(key).encrypt(_NO_NONCE, text, None)
    return found


def decrypt(key: bytes, text: bytes) -> bytes:
    """Return the text that `encrypt` encrypted. Raises ValueError if it was changed."""
    try:
        found: bytes = ChaCha20Poly1305(key).decrypt(_NO_NONCE, text, None)
    except InvalidTag:
        raise ValueError("an encrypted share was changed, or is of another exchange") from None
    return found
