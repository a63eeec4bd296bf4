"""TLS contexts for a debug API: verification of the server, and the user's client certificate."""

import ssl
from dataclasses import dataclass

from headroom.kubectl.client import Trouble


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of PEM files with kubectl's names; without ``ca``, the system's CAs are trusted."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def checked(files: Files) -> ssl.SSLContext:
    """Return a context that verifies the server's name. Raises ``Trouble``."""
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except (OSError, ValueError) as err:
        raise Trouble(f"--certificate-authority: {files.ca}: {err}", 2) from err
    return _with_client_certificate(context, files)


def within_a_tunnel(files: Files) -> ssl.SSLContext:
    """Return a context without verification, for a connection through the API server.

    The API server already selects the pod, so the pod's certificate adds nothing. Raises
    ``Trouble``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _with_client_certificate(context, files)


def _with_client_certificate(context: ssl.SSLContext, files: Files) -> ssl.SSLContext:
    if files.cert is None:
        if files.key is not None:
            raise Trouble("--client-key is set without --client-certificate; set both", 2)
        return context
    try:
        # One file may contain both. The empty password prevents a prompt for an encrypted key.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (OSError, ValueError) as err:
        where = files.cert if files.key is None else f"{files.cert}, {files.key}"
        raise Trouble(
            f"the client certificate cannot be used: {where}: {err}; set a certificate and its key "
            "in PEM. Example: --client-certificate tls.crt --client-key tls.key",
            2,
        ) from err
    return context
