"""The exec probe of the agent's container. It exits with status 0 if the local port answers 200.

Usage: ``python -m agent.liveness_probe [PATH [PORT]]`` with PATH /healthz or /readyz. The probe
runs inside the container, because a port that the kubelet can reach would be open to every pod. It
imports little, because it runs several times a minute.
"""

import socket
import sys
from collections.abc import Sequence

PORT = 9411
_TIMEOUT_S = 4.0
_MOST_BYTES = 1 << 12


def main(argv: Sequence[str]) -> int:
    """Request the path, print the body or the error, and return the exit status."""
    path = argv[0] if argv else "/healthz"
    port = int(argv[1]) if len(argv) > 1 else PORT
    try:
        with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            received = b""
            while (part := client.recv(_MOST_BYTES)) and len(received) < _MOST_BYTES:
                received += part
    except OSError as err:
        sys.stdout.write(f"no answer on 127.0.0.1:{port}: {err}\n")
        return 1
    head, _, body = received.partition(b"\r\n\r\n")
    sys.stdout.write(body.decode("utf-8", "replace"))
    return 0 if head.split(b" ")[1:2] == [b"200"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
