"""Runs a real extender and a real agent in separate processes, with faults that their metrics show.

The extender serves a fleet file. On the node ``shared``, one pod overuses memory, and another pod
overcommits a GPU that was not predicted for it. The node ``broken`` has a failed GPU. One pod is
pending for a long time. The agent has the name of the node ``shared``, but other GPUs: an
unattributed process uses one of them, and another fails.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import Device, GPUNodeStatus, PodUse, Replicas
from tests.agent.whole import Whole
from tests.builders import DISTRIBUTED, GIB
from tests.driver import AGENT_PATH, h100
from tests.processes import free_ports, starts_processes
from tests.serving import Server, binding, offer, pod, serving

FLEET = """
nodes:
- {name: shared, gpus: 2, memory: 24Gi, sharing: time-slicing, replicas: 4}
- {name: broken, gpus: 2, memory: 24Gi}
"""
#: The request of each pod, the index of its GPU, and its use in GiB.
PLACED = {"greedy": ("8Gi", 0, 10), "astray": ("20Gi", 0, 1)}


@dataclass(frozen=True, slots=True)
class TroubledFleet:
    extender: Server
    #: HOST:PORT.
    agent: str
    #: Port of the Prometheus that the extender queries. A test starts this Prometheus later.
    port: int


@pytest.fixture(scope="session")
@starts_processes
def world() -> Iterator[TroubledFleet]:
    (port, agent_port) = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(
            f"prometheus_url: http://127.0.0.1:{port}\nprometheus_refresh_s: 1\n"
            "overuse_after_s: 0\ndevice_series: 3\n"
        )
        address = f"127.0.0.1:{agent_port}"
        with serving(FLEET, "--config", str(config)) as extender:
            _happen(extender)
            with _agent(Path(folder, "node"), address):
                yield TroubledFleet(extender, address, port)


def _happen(server: Server) -> None:
    """Bind the pods one after another, because the extender waits until each pod is confirmed."""
    for count, (name, (vram, _, _)) in enumerate(PLACED.items(), 1):
        asking = pod(name, vram)
        server.post("/filter", offer(asking, "shared"))
        assert server.post("/bind", binding(asking, "shared")).json() == {"Error": ""}
        _report(server, list(PLACED)[:count])
    waiting = pod("waiting", "50Gi")
    waiting["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    answer = server.post("/filter", offer(waiting, "shared", "broken")).json()
    assert answer["NodeNames"] == []


def _report(server: Server, placed: list[str]) -> None:
    uses = [
        PodUse(f"uid-{name}", f"GPU-shared-{gpu}", replica=f"{name}::0", used_bytes=used * GIB)
        for name, (_, gpu, used) in PLACED.items()
        if name in placed
    ]
    shared = [
        _device(f"GPU-shared-{n}", 4, [use for use in uses if use.device.endswith(str(n))])
        for n in range(2)
    ]
    lost = {"healthy": False, "health_reason": "XID 79", "unhealthy_since": "2026-01-01T00:00:00Z"}
    broken = [_device("GPU-broken-0", 1, []), _device("GPU-broken-1", 1, [], **lost)]
    body = [
        {"node": name, "status": msgspec.to_builtins(status)}
        for name, status in (
            ("shared", _status(shared, uses)),
            ("broken", _status(broken, [])),
        )
    ]
    assert server.debug_post("/embedded/v1/reports", body).status == 204


def _status(devices: list[Device], uses: list[PodUse]) -> GPUNodeStatus:
    return GPUNodeStatus("2026-11-21T00:00:00Z", devices, uses, plugin=DISTRIBUTED)


def _device(uuid: str, replicas: int, uses: list[PodUse], **more: Any) -> Device:
    return Device(
        uuid,
        memory_bytes=24 * GIB,
        reserved_bytes=0,
        used_bytes=sum(use.used_bytes or 0 for use in uses),
        unattributed_bytes=0,
        sharing="time-slicing" if replicas > 1 else "none",
        resource="nvidia.com/gpu",
        replicas=Replicas(free=replicas - len(uses), allocated=len(uses)),
        **more,
    )


@contextlib.contextmanager
def _agent(folder: Path, address: str) -> Iterator[None]:
    """Serve an agent on this address during the context. Its node has two GPUs. A pod and an
    unattributed process use one GPU, and the other GPU fails.
    """
    whole = Whole(folder, [h100("GPU-a"), h100("GPU-b")], 4)
    device = whole.run("0000000a-1111-4222-8333-00000000000a", "trains", 9 * GIB)
    whole.process(4242, "python", "/user.slice/session-1.scope")
    whole.driver.use(4242, {device: 2 * GIB})
    (other,) = {"GPU-a", "GPU-b"} - {device}
    whole.driver.say(other, "fail nvmlDeviceGetMemoryInfo_v2 15")
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    flags = ["--no-publish", "--listen", address, "--metrics-access=open", "--interval=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", *flags, *whole.flags],
        env=kept | whole.environment | {"PYTHONPATH": AGENT_PATH, "NODE_NAME": "shared"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        started = process.stderr.readline()
        assert '"started"' in started, started
        yield
    finally:
        process.kill()
        process.communicate()
        whole.stop()
