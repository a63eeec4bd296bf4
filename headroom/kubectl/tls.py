"""TLS towards a debug API: who the server has to be, and who the user is by a certificate."""

import ssl
from dataclasses import dataclass

from headroom.kubectl.client import Trouble


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of files in PEM, as kubectl names them; ``ca`` is whom to trust, else the system's."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def checked(files: Files) -> ssl.SSLContext:
    """For a server that has to prove its name. Raises ``Trouble``."""
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except (OSError, ValueError) as err:
        raise Trouble(f"--certificate-authority: {files.ca}: {err}", 2) from err
    return _showing(context, files)


def within_a_tunnel(files: Files) -> ssl.SSLContext:
    """For a server that the API server has led to: it answers for the pod, and no certificate of
    the pod's could say more. Raises ``Trouble``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _showing(context, files)


def _showing(context: ssl.SSLContext, files: Files) -> ssl.SSLContext:
    if files.cert is None:
        if files.key is not None:
            raise Trouble("--client-key is given without --client-certificate; right are both", 2)
        return context
    try:
        # A file may hold both. Nobody is asked for the password of a key that has one.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (OSError, ValueError) as err:
        where = files.cert if files.key is None else f"{files.cert}, {files.key}"
        raise Trouble(
            f"the client certificate cannot be used: {where}: {err}; right are a certificate and "
            "its key in PEM: --client-certificate tls.crt --client-key tls.key",
            2,
        ) from err
    return context
