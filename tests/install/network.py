"""A cluster's network in a network namespace of its own: nothing of the machine's is touched.

The namespace is the one that this process is in (``alone``). In it a bridge is the network of pods
and nodes; every pod has a namespace of its own on it, and its own loopback.
There is no load balancer: the API server itself has the address of its Service.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.debian import ip
from tests.processes import DIE_WITH_PARENT

#: Address of the bridge, of every node and of the API server.
HOST = "10.77.0.1"
#: Address of the Service ``kubernetes``: the first of the API server's range.
API_SERVICE = "10.0.0.1"
BRIDGE = "pods"
BRIDGE_MAC = "02:00:00:00:00:01"
_NAMESPACES = ("--net", "--mount", "--pid", "--mount-proc")
_ALONE = "TEST_INSTALL_ALONE"


def alone() -> None:
    """Execute the command again in namespaces of its own, if it is not in them already.

    The kernel ends all processes in there when the command ends, however it ends, or any one that
    started it: containers, too, which may have changed their user and forgotten their parent.
    """
    if os.environ.get(_ALONE):
        return
    os.environ[_ALONE] = "yes"
    unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child"]
    os.execvp("unshare", [*unshare, sys.executable, *sys.orig_argv[1:]])


def run(*command: str, stdin: str = "") -> None:
    """Raises ``RuntimeError`` with what it printed, where it fails."""
    done = subprocess.run(
        command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}")


def build() -> None:
    """Once, in an empty network namespace."""
    for setting in (
        ("link", "set", "lo", "up"),
        # An address of its own: else it takes that of a pod's device, and when that pod goes, the
        # others send to an address that no process has any more, until they forget it.
        ("link", "add", BRIDGE, "address", BRIDGE_MAC, "type", "bridge"),
        ("address", "add", f"{HOST}/16", "dev", BRIDGE),
        ("address", "add", f"{API_SERVICE}/32", "dev", BRIDGE),
        ("link", "set", BRIDGE, "up"),
    ):
        run(*ip(), *setting)


def address(number: int) -> str:
    """Return the address of a pod."""
    return f"10.77.{1 + number // 250}.{1 + number % 250}"


class PodNetwork:
    """The network of one pod, held by a process that does nothing else: its pause container."""

    def __init__(self, address: str) -> None:
        pause = *DIE_WITH_PARENT, str(os.getpid()), "unshare", "--net", "sleep", "infinity"
        self._pause = subprocess.Popen(pause, stdin=subprocess.DEVNULL)
        host = f"pod{address.removeprefix('10.77.')}"
        outside = (
            f"link add {host} type veth peer name eth0 netns {self.pid}",
            f"link set {host} master {BRIDGE} up",
        )
        inside = (
            "link set lo up",
            f"address add {address}/16 dev eth0",
            "link set eth0 up",
            f"route add default via {HOST}",
        )
        try:
            self._await_namespace()
            run(*ip(), "-batch", "-", stdin="\n".join(outside))
            run(*self.enter, *ip(), "-batch", "-", stdin="\n".join(inside))
        except RuntimeError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """A process whose network this is."""
        return self._pause.pid

    @property
    def enter(self) -> Sequence[str]:
        """The command prefix with which a command runs in it."""
        return "nsenter", "--target", str(self.pid), "--net"

    def _await_namespace(self) -> None:
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self.pid}/ns/net") == ours:
            time.sleep(0.005)

    def close(self) -> None:
        self._pause.kill()
        self._pause.wait()
