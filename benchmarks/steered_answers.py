"""Measures the CPU time of an agent's answer to GetPreferredAllocation.

    python -m benchmarks.steered_answers [--answers 50]

One replica of each GPU is free, and one pod is unconfirmed. For each answer the agent decodes the
GPUNode, reads the kubelet's checkpoint and chooses. The figures do not include the time of the API
server and of the network, and the agent takes no new sample. The last column is how long an answer
takes if the agent gets exactly the CPU that it requests when it may steer. The kubelet's limit is
1 s.
"""

import argparse
import base64
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agent.logs import log_to_stderr
from agent.probes.protobuf import field
from agent.steering.messages import ContainerRequest
from agent.steering.preferred_allocation import PreferredAllocation
from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
)
from headroom.contract.gpunode_json import decode_gpunode

RESOURCE = "nvidia.com/gpu"
GIB = 1 << 30
#: Pairs of the number of GPUs and the replicas of each.
NODES = ((1, 4), (8, 10), (16, 48))
#: CPU that the agent requests if it may steer, in cores.
REQUEST_CORES = 0.1
#: The plugin's answer to Allocate, as the checkpoint stores it for each container.
ALLOCATED = base64.b64encode(
    field(1, field(1, "NVIDIA_VISIBLE_DEVICES") + field(2, "void"))
    + field(4, field(1, "cdi.k8s.io/nvidia-device-plugin_x") + field(2, "nvidia.com/gpu=GPU-x"))
).decode()


class Ledger:
    """An API server that answers immediately."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def gpunode(self, within_s: float) -> GPUNode:
        return decode_gpunode(self._body)


def uuid(prefix: str, number: int) -> str:
    return f"{prefix}{number:08x}-8d4e-4f5a-9b6c-7d8e9f0a1b2c"


def node(gpus: Sequence[str], replicas: int) -> tuple[bytes, GPUNodeStatus, str]:
    """Return the GPUNode as JSON, the agent's sample and the kubelet's checkpoint."""
    held = [
        (uuid("", number), gpu, f"{gpu}::{replica}")
        for number, (gpu, replica) in enumerate(
            (gpu, replica) for gpu in gpus for replica in range(replicas - 1)
        )
    ]
    status = GPUNodeStatus(
        devices=[
            Device(
                uuid=gpu,
                memory_bytes=80 * GIB,
                reserved_bytes=0,
                used_bytes=0,
                unattributed_bytes=0,
                sharing="time-slicing",
                resource=RESOURCE,
                replicas=Replicas(free=1, allocated=replicas - 1),
            )
            for gpu in gpus
        ],
        pods=[
            PodUse(uid, gpu, "ns", f"pod-{uid[:8]}", "main", replica, used_bytes=GIB)
            for uid, gpu, replica in held
        ],
        plugin=Plugin(steered=[RESOURCE]),
    )
    spec = GPUNodeSpec(
        initialised=True,
        reservations={
            uid: Reservation("ns", f"pod-{uid}", [Charge(RESOURCE, 1, {gpu: GIB}, choices=[gpu])])
            for uid, gpu in [*((uid, gpu) for uid, gpu, _ in held), ("unconfirmed", gpus[0])]
        },
    )
    body = msgspec.json.encode(
        {"metadata": {"name": "n", "uid": "u"}, "spec": spec, "status": status}
    )
    entries = [
        {
            "PodUID": uid,
            "ContainerName": "main",
            "ResourceName": RESOURCE,
            "DeviceIDs": {"-1": [replica]},
            "AllocResp": ALLOCATED,
        }
        for uid, _, replica in held
    ]
    registered = {RESOURCE: [f"{gpu}::{replica}" for gpu in gpus for replica in range(replicas)]}
    data = {"PodDeviceEntries": entries, "RegisteredDevices": registered}
    return body, status, json.dumps({"Data": data, "Checksum": 1})


def answers_s(gpu_count: int, replicas: int, answers: int) -> list[float]:
    """Return the CPU seconds of each answer, in ascending order."""
    gpus = [uuid("GPU-", number) for number in range(gpu_count)]
    body, status, checkpoint = node(gpus, replicas)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint"
        file.write_text(checkpoint)
        allocation = PreferredAllocation(
            file,
            Path(folder) / "no.sock",
            Ledger(body),
            lambda: status,
            lambda: 0,
            lambda: DeviceChoice.STEERED,
            lambda: "v1.36.3",
            lambda: None,
        )
        request = ContainerRequest(tuple(f"{gpu}::{replicas - 1}" for gpu in gpus), (), 1)
        took_s = []
        for _ in range(answers):
            began_s = time.process_time()
            chosen = allocation._choose(RESOURCE, request)
            took_s.append(time.process_time() - began_s)
            assert chosen == (f"{gpus[0]}::{replicas - 1}",), chosen
    return sorted(took_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=50, help="number of answers of each node")
    args = parser.parse_args()
    log_to_stderr()
    sys.stdout.write(f"{platform.machine()}, Python {platform.python_version()}\n")
    for gpus, replicas in NODES:
        took_s = answers_s(gpus, replicas, args.answers)
        p50_ms, p99_ms = (1000 * took_s[int(share * (len(took_s) - 1))] for share in (0.5, 0.99))
        sys.stdout.write(
            f"{gpus} GPUs x {replicas}: CPU of an answer p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms;"
            f" with {REQUEST_CORES * 1000:.0f}m p99 {p99_ms / REQUEST_CORES:.0f} ms elapsed\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
