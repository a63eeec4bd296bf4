"""Opens the port of a server on IPv4, IPv6 or both."""

import errno
import socket

#: Errors of a machine without IPv6.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def without_brackets(host: str) -> str:
    """Return the host, without brackets if it is an IPv6 address in brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int) -> str:
    """Return the host and the port as in a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on ``host``: an address, with or without brackets, or a name.

    ``::`` and an empty host stand for all IPv6 and IPv4 addresses, or all IPv4 addresses on a
    machine without IPv6. ``0.0.0.0`` stands for all IPv4 addresses. Connections inherit
    TCP_NODELAY. Without it, the body of a response is sent only after the client has acknowledged
    the headers, and clients delay this by 40 ms. Raises ``OSError``.
    """
    sock = _listening(host, port, backlog)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    host = without_brackets(host)
    if host in ("", "::"):
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        except OSError as err:
            if err.errno not in _NO_IPV6:
                raise
            host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
