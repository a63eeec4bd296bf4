"""Sessions at the console (``contract.console``). A private file keeps each session for its
lifetime.

Without the file, each command would create a CertificateSigningRequest (CSR), which Kubernetes
deletes only after 24 hours.
"""

import base64
import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from headroom.contract.console import LIFETIME_S, SIGNER, csr_name

#: Seconds for which a session is used. This is less than the lifetime of the session, because
#: clocks differ.
USED_S = LIFETIME_S - 600
#: A valid certificate request, because the API server requires one. The key of the request was
#: discarded and is never used.
_REQUEST = """\
-----BEGIN CERTIFICATE REQUEST-----
MIHQMHkCAQAwFzEVMBMGA1UEAwwMaGVhZHJvb20uZ3B1MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAESM+a/kcHurgSov/6syFTabSOGNBNlJ/qB3ZJgnB2zD1P8YAE
V/rcxaNxLuZqOinZqdnKKF7ZwdpPiB0E21JiH6AAMAoGCCqGSM49BAMCA0cAMEQC
ICG/iUhqAv6mhEWJKAC8mlS5Ww8U4D3b5EC1yo3N1fSRAiBpYUA9nmXlscdL47NW
PJ9R7ooKAcbQCnxVjKlljnPbXA==
-----END CERTIFICATE REQUEST-----
"""


def new_secret() -> str:
    """Return a random secret of 256 bits."""
    return secrets.token_urlsafe(32)


def csr(secret: str) -> dict[str, object]:
    """Return the CSR that creates a session."""
    return {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": csr_name(secret)},
        "spec": {
            "request": base64.b64encode(_REQUEST.encode()).decode(),
            "signerName": SIGNER,
            "expirationSeconds": LIFETIME_S,
            "usages": ["client auth"],
        },
    }


def folder() -> Path:
    """Return the folder of the files, which is in kubectl's own cache."""
    try:
        return Path(os.environ.get("KUBECACHEDIR") or Path.home() / ".kube/cache", "headroom")
    except RuntimeError:  # there is no home, as in a container with an arbitrary user
        return Path(os.devnull, "headroom")


class Sessions:
    """The sessions of one user. ``create`` creates a CSR, and raises ``CommandError``."""

    def __init__(
        self,
        create: Callable[[dict[str, object]], object],
        folder: Path,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._create = create
        self._folder = folder
        self._wall_s = wall_s
        #: The secret and the Unix time of its creation, by the hash of the credential.
        self._held: dict[str, tuple[str, float]] = {}

    def secret(self, *credential: bytes) -> str:
        """Return the secret of a session for the user with this credential.

        A new credential can name another user or other groups, so it gets a new session.
        """
        key = _key(credential)
        secret, created_s = self._held.get(key) or self._read(key)
        if not 0 <= self._wall_s() - created_s < USED_S:
            secret, created_s = new_secret(), self._wall_s()
            self._create(csr(secret))
            self._write(key, secret, created_s)
        self._held[key] = secret, created_s
        return secret

    def forget(self, *credential: bytes) -> None:
        """Stop using the session, because the console rejects it."""
        key = _key(credential)
        self._held.pop(key, None)
        with contextlib.suppress(OSError):
            (self._folder / key).unlink()

    def _read(self, key: str) -> tuple[str, float]:
        """Return the secret in the file and the time of its creation, or ("", -inf)."""
        try:
            with (self._folder / key).open(encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                # Otherwise another user of this machine could choose or read the secret.
                if found.st_uid == os.getuid() and not found.st_mode & 0o077:
                    secret, created_s = json.load(file)
                    if csr_name(secret):
                        return secret, float(created_s)
        except (OSError, ValueError, TypeError, AttributeError):  # Windows has no getuid
            pass
        return "", float("-inf")

    def _write(self, key: str, secret: str, created_s: float) -> None:
        """Write the file, and delete the files of sessions that have ended.

        If the file cannot be written, the next command creates its own session.
        """
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in self._folder.iterdir():
                if created_s - old.stat().st_mtime > LIFETIME_S:
                    old.unlink()
            new = self._folder / f"{key}.{uuid4().hex}"
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump([secret, created_s], file)
            new.replace(self._folder / key)


def _key(credential: tuple[bytes, ...]) -> str:
    digests = (hashlib.sha256(part).digest() for part in credential)
    return hashlib.sha256(b"".join(digests)).hexdigest()
