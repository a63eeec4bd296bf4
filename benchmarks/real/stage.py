"""A real etcd, API server and kube-scheduler with a fleet of Node objects and hundreds of pods.

To have no overhead of its own, the measurement writes nodes and pods directly to etcd, many in one
transaction. The time of each bind comes from a watch, whose lines are parsed afterwards.
"""

import base64
import contextlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import urllib3

from benchmarks.hotpath.bodies import pod_as_sent
from benchmarks.scale import Extender
from benchmarks.scale_objects import (
    cluster_objects,
    fill,
    gpunode,
    heartbeats,
    node_name,
    pod,
    stamp,
)
from benchmarks.vitals import vitals
from tests.controlplane import (
    ADMIN_TOKEN,
    SCHEDULER_NAME,
    ControlPlane,
)
from tests.e2e.cluster import GPUNODES, NAMESPACE, PODS, Cluster

Object = dict[str, Any]

#: kube-scheduler's default limit of 50 requests a second would be the bottleneck.
UNHURRIED = {"qps": 5000, "burst": 10000}
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PATIENCE_S = 180.0


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str


class _Object(msgspec.Struct):
    metadata: _Meta


class _Told(msgspec.Struct):
    object: _Object


_told = msgspec.json.Decoder(_Told)


class Bound:
    """The times at which the watch reported each pod as bound, while the context lasts."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._version = plane.call("GET", f"{PODS}?limit=1")["metadata"]["resourceVersion"]
        self._http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)
        self._answer = self._open()
        self._over = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        #: Pod -> monotonic time of the first event that shows it bound.
        self.at_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        with contextlib.suppress(RuntimeError):  # the watch can end by itself at the same moment
            self._answer.shutdown()
        self._thread.join()

    def _open(self) -> urllib3.BaseHTTPResponse:
        query = f"watch=1&resourceVersion={self._version}&fieldSelector=spec.nodeName!="
        answer = self._http.request(
            "GET",
            f"{self._plane.url}{PODS}?{query}",
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Accept": METADATA_ONLY},
            preload_content=False,
        )
        if answer.status != 200:
            raise RuntimeError(f"watch: {answer.status} {answer.data!r}")
        return answer

    def _read(self) -> None:
        """Read the watch; if the API server ends it, open it again."""
        while True:
            rest = b""
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                while chunk := self._answer.read1():
                    at_s = time.monotonic()
                    if self._over:
                        return
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        metadata = _told.decode(line).object.metadata
                        self._version = metadata.resource_version
                        self.at_s.setdefault(metadata.name, at_s)
            if self._over:
                return
            self._answer = self._open()

    def wait(self, names: Iterable[str], patience_s: float = PATIENCE_S) -> list[float]:
        """Wait until all these pods are bound; return the time at which each of them was."""
        waiting, deadline_s = set(names), time.monotonic() + patience_s
        found = sorted(waiting)
        while waiting := waiting - self.at_s.keys():
            if not self._thread.is_alive():
                raise RuntimeError("the watch is broken")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(waiting)} pods are not bound: {sorted(waiting)[:3]} ...")
            time.sleep(0.02)
        return [self.at_s[name] for name in found]


@dataclass(frozen=True, slots=True)
class Spent:
    """The CPU seconds of each process."""

    of: Mapping[str, float]

    def since(self, earlier: "Spent") -> "Spent":
        return Spent({name: s - earlier.of[name] for name, s in self.of.items()})


class Stage:
    """A fleet of ``nodes`` nodes with 8 GPUs in 4 replicas each, with ``held`` pods on each
    node."""

    def __init__(self, nodes: int, held: int, plane: ControlPlane) -> None:
        self.nodes, self.held = nodes, held
        self.plane = plane
        self.cluster = Cluster(plane, ())
        self.headroom = Extender(self.cluster)
        self._numbers: dict[str, int] = {node_name(index): index for index in range(nodes)}

    def put(self, pods: Iterable[Object]) -> None:
        """Write pods one after the other, as the API server does.

        Watches of the API server break where a hundred objects have the same version.
        """
        keyed = ((f"pods/{NAMESPACE}/{each['metadata']['name']}", each) for each in pods)
        fill(self.plane, keyed, together=1)

    def start_headroom(self, *, best_only: bool = True) -> str:
        """Start Headroom with one heartbeat of every node; return the address of its verbs."""
        fill(self.plane, heartbeats(self.nodes))
        self.headroom.start({"stale_after_s": 3600.0, "filter_best_only": best_only})
        return f"http://127.0.0.1:{self.cluster.port}"

    @contextlib.contextmanager
    def profiled(self, spy: str, variant: str) -> Iterator[None]:
        """Let py-spy profile the extender meanwhile, if it runs and a ``spy`` is given."""
        name = {"none": "", "headroom": "extender"}.get(variant, "nothing")
        if not spy or not name:
            yield
            return
        Path("profiles").mkdir(exist_ok=True)
        file = f"profiles/{variant}-{self.nodes}.txt"
        command = [spy, "record", "--pid", str(self.plane.pid(name)), "--output", file]
        command += ["--format", "raw", "--rate", "500", "--duration", "3600", "--gil"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            yield
            process.send_signal(signal.SIGINT)

    def kill(self, *names: str) -> None:
        for name in names:
            if self.plane.runs(name):
                self.plane.kill(name)

    def spent(self, *names: str) -> Spent:
        return Spent({name: vitals(self.plane.pid(name)).cpu_s for name in names})

    def clear(self, prefix: str) -> None:
        """Delete these pods and their reservations from etcd, as if they had never existed."""
        listed = self.plane.call("GET", PODS)["items"]
        came = [each for each in listed if each["metadata"]["name"].startswith(prefix)]
        on = {each["spec"].get("nodeName") for each in came} - {None}
        self.delete(f"pods/{NAMESPACE}/{prefix}", prefix=True)
        self.restore(on)

    def delete(self, key: str, *, prefix: bool = False) -> None:
        """Delete a key from etcd, or with ``prefix`` all keys that begin with it."""
        first = f"/registry/{key}".encode()
        keys = {"key": first}
        if prefix:
            keys["range_end"] = first[:-1] + bytes([first[-1] + 1])
        url = f"http://127.0.0.1:{self.plane.etcd_port}/v3/kv/deleterange"
        body = {name: base64.b64encode(value).decode() for name, value in keys.items()}
        answer = urllib3.request("POST", url, json=body, retries=False, timeout=60.0)
        if answer.status != 200:
            raise RuntimeError(f"etcd: {answer.status} {answer.data.decode()}")

    def refill(self, indices: Iterable[int]) -> None:
        """Create the pods and reservations of these nodes again."""
        again = list(indices)
        pods = [n for i in again for n in range(i, self.nodes * self.held, self.nodes)]
        fill(
            self.plane,
            ((f"pods/{NAMESPACE}/pod-{n}", pod(n, n % self.nodes, gpu=True)) for n in pods),
        )
        self.restore(map(node_name, again))

    def restore(self, names: Iterable[str]) -> None:
        """Restore these GPUNodes to their state at the start."""
        indices = sorted(self._numbers[name] for name in names)
        pods = self.nodes * self.held
        fill(
            self.plane,
            (
                (
                    f"headroom.gpu/gpunodes/{node_name(index)}",
                    gpunode(index, range(index, pods, self.nodes)),
                )
                for index in indices
            ),
        )


@contextlib.contextmanager
def stage(nodes: int, held: int) -> Iterator[Stage]:
    """Yield the fleet in a running API server, without any scheduler."""
    plane = ControlPlane()
    try:
        plane.start()
        plane.install_crd()
        set_up = Stage(nodes, held, plane)
        set_up.cluster.create()
        plane.kill("kube-apiserver")
        pods = nodes * held
        fill(plane, cluster_objects(nodes, pods, pods))
        plane.start_apiserver(PATIENCE_S)
        # The API server answers this once it has read all GPUNodes.
        plane.call("GET", f"{GPUNODES}?limit=1&resourceVersion=0")
        yield set_up
    except TimeoutError as err:
        raise TimeoutError(f"{err}\n{plane.logs()}") from err
    finally:
        plane.stop()


def pending(name: str, vram: str | None, priority: int = 0) -> Object:
    """Return a pod as the API server keeps it; without ``vram`` it asks for no GPU."""
    made = pod_as_sent(name, vram or "")
    metadata, spec = made["metadata"], made["spec"]
    metadata |= {
        "namespace": NAMESPACE,
        "uid": f"uid-{name}",
        "creationTimestamp": stamp(),
        "generation": 1,
    }
    del metadata["resourceVersion"], metadata["managedFields"]
    spec |= {"schedulerName": SCHEDULER_NAME, "priority": priority}
    if vram is None:
        del metadata["annotations"]
        requests = {"cpu": "100m", "memory": "1Gi"}
        spec["containers"][0]["resources"] = {"requests": requests, "limits": requests}
    return {"apiVersion": "v1", "kind": "Pod", **made}


def latencies(
    on: Stage, bound: Bound, names: Sequence[str], vrams: Sequence[str | None], every_s: float
) -> list[float]:
    """Return the seconds from the creation of each pod until it was bound, in the order of their
    names.

    Pods are created one after the other, whether or not the previous one was bound. The pauses are
    out of step with what kube-scheduler does once a second.
    """
    came_s: dict[str, float] = {}
    due_s, dice = time.monotonic(), random.Random(1)
    for name, vram in zip(names, vrams, strict=True):
        time.sleep(max(0.0, due_s - time.monotonic()))
        due_s += every_s * dice.uniform(0.5, 1.5)
        incoming = pending(name, vram)
        came_s[name] = time.monotonic()
        on.put([incoming])
    bound.wait(names)
    return [bound.at_s[name] - came_s[name] for name in names]


def quantile(values: Sequence[float], ratio: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * ratio))]
