"""Returns a resource to its plugin: registers the plugin itself and removes the proxies' sockets.

``plugin_registration`` describes how a kubelet treats two endpoints of one resource.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from agent.steering.plugin_proxy import PREFIX, options_of, plugin_of, register

_log = structlog.get_logger()

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the kubelet, and how often to ask the plugin."""

    #: Maximum number of seconds until the kubelet notices that the proxy is gone or the plugin is
    #: back.
    notice_s: float = 3.0
    #: Seconds for which the plugin's devices must stay healthy before they count as back.
    stays_s: float = 1.0
    tries: int = 5


PATIENCE = Patience()

#: A function that returns whether the kubelet has healthy devices of a resource, or None if this is
#: unknown.
Healthy = Callable[[str], bool | None]


def plugin_socket(resource: str) -> str:
    """Return the file name of the socket that NVIDIA's plugin creates for a resource."""
    return f"nvidia-{resource.removeprefix('nvidia.com/')}.sock"


def resource_of(socket: str) -> str:
    """Return the resource that NVIDIA's plugin serves on a socket, given the socket's file name."""
    return f"nvidia.com/{socket.removeprefix('nvidia-').removesuffix('.sock')}"


def bring_back(folder: Path, plugin: str, healthy: Healthy, patience: Patience = PATIENCE) -> bool:
    """Register the plugin itself, and return whether the kubelet uses it again.

    First wait at most ``notice_s`` until the kubelet has noticed that the proxy is gone. If the
    plugin does not answer ``tries`` times, it is probably not running. It registers itself when it
    starts.
    """
    resource = resource_of(plugin)
    wait_until(lambda: healthy(resource) is False, patience.notice_s)
    for _ in range(patience.tries):
        try:
            register(folder, plugin, resource, options_of(folder, plugin))
        except grpc.RpcError as err:
            _log.warning("plugin_not_brought_back", resource=resource, reason=status(err))
            time.sleep(RETRY_S)
            continue
        wait_until(lambda: healthy(resource) is True, patience.notice_s)
        time.sleep(patience.stays_s)
        if healthy(resource) is not False:
            _log.info("plugin_brought_back", resource=resource)
            return True
    return False


def leftovers(folder: Path) -> list[str]:
    """Return the names of the sockets of plugins that a killed agent has left unregistered."""
    return sorted({plugin_of(each.name) for each in folder.glob(f"{PREFIX}*.sock")})


def proxies(folder: Path, plugin: str) -> set[str]:
    """Return the file names of the sockets of a plugin's proxies."""
    found = (each.name for each in folder.glob(f"{PREFIX}*.sock"))
    return {name for name in found if plugin_of(name) == plugin}


def remove_proxies(folder: Path, plugin: str, but: str = "") -> None:
    """Remove the sockets of a plugin's proxies except ``but``. Raises ``OSError``."""
    for name in proxies(folder, plugin) - {but}:
        (folder / name).unlink(missing_ok=True)


def restore(
    folder: Path, plugin: str, healthy: Healthy, promotes: bool, patience: Patience = PATIENCE
) -> None:
    """Register a plugin that a killed agent left unregistered, and remove the agent's sockets.

    The sockets are removed even if the plugin does not answer. ``promotes`` states whether the
    kubelet returns to the plugin by itself (see ``PluginRegistration``).
    """
    if not promotes:
        bring_back(folder, plugin, healthy, patience)
    try:
        remove_proxies(folder, plugin)
    except OSError as err:
        # Without permission to steer, the directory is read-only. The kubelet clears it at its next
        # start.
        _log.info("steering_socket_stays", plugin=plugin, reason=err.strerror)


def leave_socket(path: Path) -> None:
    """Create a socket file like the one that a killed agent leaves."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
        path.unlink(missing_ok=True)
        made.bind(str(path))


def wait_until(done: Callable[[], bool], within_s: float) -> None:
    """Wait until ``done`` returns true, but at most ``within_s`` seconds."""
    deadline_s = time.monotonic() + within_s
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def status(err: grpc.RpcError) -> str:
    return f"{err.code().name}: {err.details()}"
