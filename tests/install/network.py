"""Creates the network of a cluster in a network namespace, separate from the machine's network.

``alone`` creates the namespace of this process. A bridge in this namespace connects pods and nodes.
Each pod has its own network namespace with its own loopback device. The API server itself has the
address of its Service, because there is no load balancer.
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
#: Address of the Service ``kubernetes``, which is the first address of the API server's range.
API_SERVICE = "10.0.0.1"
BRIDGE = "pods"
BRIDGE_MAC = "02:00:00:00:00:01"
_NAMESPACES = ("--net", "--mount", "--pid", "--mount-proc")
_ALONE = "TEST_INSTALL_ALONE"


def alone() -> None:
    """Execute this command again in its own namespaces, unless it already runs in them.

    When the command or a process that started it ends for any reason, the kernel kills all
    processes in the namespaces, including containers with another user or a dead parent.
    """
    if os.environ.get(_ALONE):
        return
    os.environ[_ALONE] = "yes"
    unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child"]
    os.execvp("unshare", [*unshare, sys.executable, *sys.orig_argv[1:]])


def run(*command: str, stdin: str = "") -> None:
    """Run a command. Raise ``RuntimeError`` with its output if it fails."""
    done = subprocess.run(
        command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}")


def build() -> None:
    """Build the network in an empty network namespace."""
    for setting in (
        ("link", "set", "lo", "up"),
        # Set the bridge's address. Otherwise, the bridge takes the address of a pod's device, and
        # when the pod is deleted, other pods keep sending to the old address until their caches
        # expire.
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
    """The network of one pod. A process that only waits keeps it open, like a pause container."""

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
        """Return the ID of the process that keeps the network open."""
        return self._pause.pid

    @property
    def enter(self) -> Sequence[str]:
        """Return the prefix that makes a command run in this network."""
        return "nsenter", "--target", str(self.pid), "--net"

    def _await_namespace(self) -> None:
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self.pid}/ns/net") == ours:
            time.sleep(0.005)

    def close(self) -> None:
        self._pause.kill()
        self._pause.wait()
