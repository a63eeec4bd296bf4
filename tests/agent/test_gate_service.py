"""Runs the gate of a pod, which calls an agent process with a fake API server and records of the
kubelet.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.agent.scripted import GPUNODE, ApiServer
from tests.agent.whole import Whole
from tests.driver import AGENT_PATH, GIB, Gpu
from tests.processes import starts_processes
from tests.waiting import PATIENCE_S, until

UID = "00000001-1111-4222-8333-000000000001"
OTHER = "00000002-1111-4222-8333-000000000002"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer.serving() as state:
        state.create("uid-1")
        state.node = {"metadata": {"name": "n1", "annotations": {"headroom.gpu/reserve": "1Gi"}}}
        yield state


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    built = Whole(tmp_path, [Gpu("GPU-a", 80 * GIB, reserved_bytes=0)], 4)
    yield built
    built.stop()


@pytest.fixture
@starts_processes
def http(api: ApiServer, whole: Whole) -> Iterator[httpx.Client]:
    kubeconfig = whole.folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(api.kubeconfig))
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "agent", "--listen", "127.0.0.1:0"),
            "--interval",
            "1",
            "--metrics-access=open",
            *whole.flags,
        ],
        env=os.environ
        | whole.environment
        | {"PYTHONPATH": AGENT_PATH, "NODE_NAME": "n1", "KUBECONFIG": str(kubeconfig)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            port = process.stderr.readline().split('"port": ')[1].split(",")[0]
            base = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=base, trust_env=False, timeout=PATIENCE_S) as client:
                yield client
        finally:
            process.kill()


def reservation(api: ApiServer, uid: str, gib: int) -> None:
    assert api.gpunode is not None
    charge = {"resource": "nvidia.com/gpu", "count": 1, "candidates": {"GPU-a": gib * GIB}}
    reservation = {"namespace": "default", "name": f"pod-{uid[7]}", "charges": [charge]}
    api.gpunode["spec"].setdefault("reservations", {})[uid] = reservation


def test_a_gated_pod_waits_and_then_starts_or_is_rejected_without_free_memory(
    http: httpx.Client, api: ApiServer, whole: Whole
) -> None:
    def asked(uid: str) -> tuple[int, str]:
        answer = http.get("/v1/gate", params={"pod_uid": uid})
        return answer.status_code, answer.json()["answer"]

    assert asked(UID) == (503, "not yet")
    reservation(api, UID, 70)
    assert asked(UID) == (503, "not yet")  # The kubelet has not admitted the pod.
    whole.run(UID, "pod-1", 0)
    until(lambda: asked(UID) == (200, "yes"), "a pod that may start")
    # The agent reads from etcd, because the API server's cache can lack the newest reservations.
    assert ("GET", GPUNODE) in api.sent()
    written = 'headroom_agent_writes_total{kind="report",outcome="accepted"} '
    (count,) = re.findall(rf"^{re.escape(written)}(\S+)$", http.get("/metrics").text, re.M)
    assert float(count) >= 1
    reservation(api, OTHER, 10)  # The GPU has 80 GiB, and 1 GiB must stay free.
    whole.run(OTHER, "pod-2", 0)
    until(lambda: asked(OTHER) == (409, "no"), "a pod that does not fit")
    reservation(api, OTHER, 9)
    until(lambda: asked(OTHER) == (200, "yes"), "a pod for which there is")
    api.reject["GET", GPUNODE] = (500, {})
    until(lambda: asked(OTHER) == (503, "not yet"), "no pod starts without data")
