"""Measures the recorder's memory and CPU in a large cluster.

    python -m benchmarks.recorder_scale [--nodes 5000] [--pods 100000] [--owners 20000]

The process holds what a recorder holds: the reports of nodes with 8 GPUs, the pods as the watch
delivers them, the lives of running pods, and a VRAMProfile for each owner. The API server is
replaced by a dictionary, so its answers take no time. In each round a share of the pods ends and is
replaced, and the peaks of about a quarter of the pods rise. The command prints the CPU time of each
round.
"""

import asyncio
import gc
import random
import resource
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import typer
from prometheus_client import CollectorRegistry

from benchmarks.hotpath.machine import machine
from headroom.contract.gpunode import Device, GPUNode, GPUNodeStatus, PodUse
from headroom.contract.kube import ObjectMeta, OwnerReference
from headroom.contract.vramprofile import ProfileOwner, VRAMProfile, decode_profile, stamp
from headroom.contract.watched import GPUNodeSeen, PodGone, PodSeen
from headroom.core.placement.policy import Rules
from headroom.core.recommend.lives import DAY_S, Ending, Life
from headroom.core.recommend.profile import Profile
from headroom.core.recommend.profile_status import status_of
from headroom.recorder.metrics import RecorderTelemetry
from headroom.recorder.pod_facts import PodFacts, read_pod
from headroom.recorder.rounds import Observed, Recorder

MIB, GIB = 1 << 20, 1 << 30
GPUS = 8
START_S = 1_800_000_000.0


@dataclass
class Api:
    """A dictionary of owners and profiles that answers like an API server."""

    profiles: dict[tuple[str, str], bytes] = field(default_factory=dict)
    writes: int = 0

    def owner(self, pod: PodFacts) -> tuple[ProfileOwner, OwnerReference | None]:
        assert pod.controller is not None
        name = pod.controller.name.removesuffix("-5d4f")
        return ProfileOwner(kind="Deployment", name=name, api_version="apps/v1"), None

    def list(self) -> list[VRAMProfile]:
        return [decode_profile(each) for each in self.profiles.values()]

    def read(self, namespace: str, name: str) -> VRAMProfile | None:
        found = self.profiles.get((namespace, name))
        return decode_profile(found) if found else None

    def write(self, profile: VRAMProfile) -> VRAMProfile:
        self.writes += 1
        metadata = msgspec.structs.replace(profile.metadata, resource_version=str(self.writes))
        body = msgspec.json.encode(msgspec.structs.replace(profile, metadata=metadata))
        self.profiles[profile.metadata.namespace, profile.metadata.name] = body
        return decode_profile(body)

    def delete(self, profile: VRAMProfile) -> None:
        del self.profiles[profile.metadata.namespace, profile.metadata.name]


def profile(owner: str, number: int, chance: random.Random) -> VRAMProfile:
    """Return the profile of an owner with 40 lives of the last 30 days."""
    kept, typical = Profile(), chance.uniform(2, 20) * GIB
    for end_s in sorted(START_S - chance.uniform(0, 30) * DAY_S for _ in range(40)):
        peak = int(typical * chance.lognormvariate(0, 0.05))
        life = Life(peak, end_s - 3600, end_s, Ending.COMPLETED)
        kept.container("main", "NVIDIA L40S").record("p", life)
    of = ProfileOwner(kind="Deployment", name=owner, api_version="apps/v1")
    metadata = ObjectMeta(
        name=f"deployment-{owner}", namespace=f"team-{number % 200}", resource_version="1"
    )
    return VRAMProfile(metadata=metadata, status=status_of(kept, of, {}, START_S))


class Fleet:
    """Pods and reports; ``churn`` replaces pods and raises the peaks of about a quarter."""

    def __init__(self, nodes: int, pods: int, owners: int) -> None:
        self._chance = random.Random(1)
        self._nodes, self._owners = nodes, owners
        self._number = 0
        #: Uid of a pod -> its node, start and peak.
        self._pods: dict[str, tuple[int, float, int]] = {}
        self.observed = Observed()
        for _ in range(pods):
            self._create(START_S - 7200)

    def _create(self, now_s: float) -> None:
        number = self._number
        self._number += 1
        owner, uid = f"app-{number % self._owners}", f"00000000-0000-4000-8000-{number:012d}"
        pod = {
            "metadata": {
                **{"name": f"{owner}-5d4f-{number}", "namespace": f"team-{number % 200}"},
                **{"uid": uid, "resourceVersion": "7", "labels": {"pod-template-hash": "5d4f"}},
                "ownerReferences": [
                    {
                        **{"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True},
                        **{"name": f"{owner}-5d4f", "uid": f"rs-{owner}"},
                    }
                ],
            },
            "spec": {
                "containers": [
                    {
                        **{
                            "name": "main",
                            "image": f"registry/team/{owner}:1",
                            "args": ["--x", "1"],
                        },
                        "resources": {"limits": {"nvidia.com/gpu": "1"}},
                    }
                ]
            },
            "status": {"phase": "Running"},
        }
        self.observed.apply([PodSeen(read_pod(msgspec.json.encode(pod), Rules()))])
        peak = int(self._chance.uniform(2, 20) * GIB)
        self._pods[uid] = number % self._nodes, now_s, peak

    def churn(self, share: float, now_s: float) -> None:
        for uid in self._chance.sample(sorted(self._pods), int(share * len(self._pods))):
            del self._pods[uid]
            self.observed.apply([PodGone(uid, now_s)])
            self._create(now_s)
        self.report()

    def report(self) -> None:
        rows: list[list[PodUse]] = [[] for _ in range(self._nodes)]
        for uid, (node, started_s, peak) in self._pods.items():
            peak += self._chance.choice((0, 0, 0, 64 * MIB))
            self._pods[uid] = node, started_s, peak
            device = f"GPU-{node}-{len(rows[node]) % GPUS}"
            use = PodUse(uid=uid, device=device, container="main", peak_bytes=peak, used_bytes=peak)
            rows[node].append(msgspec.structs.replace(use, started_at=stamp(started_s)))
        for node, uses in enumerate(rows):
            devices = [
                Device(uuid=f"GPU-{node}-{i}", model="NVIDIA L40S", memory_bytes=48 * GIB)
                for i in range(GPUS)
            ]
            status = GPUNodeStatus(devices=devices, pods=uses)
            name = f"node-{node:04d}"
            self.observed.apply([GPUNodeSeen(GPUNode(ObjectMeta(name=name), status=status), 0.0)])


def rss_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main(
    nodes: int = 5000,
    pods: int = 100_000,
    owners: int = 20_000,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    churned: Annotated[float, typer.Option(help="Share of the pods replaced per round.")] = 0.001,
) -> None:
    typer.echo(machine())
    before = rss_mib()
    api, fleet = Api(), Fleet(nodes, pods, owners)
    fleet.report()
    chance = random.Random(2)
    for number in range(owners):
        made = profile(f"app-{number}", number, chance)
        key = made.metadata.namespace, made.metadata.name
        api.profiles[key] = msgspec.json.encode(made)
    gc.collect()
    # A real recorder does not hold these objects; the API server does.
    before += sum(map(len, api.profiles.values())) / MIB
    typer.echo(f"reports and pods: {rss_mib() - before:.0f} MiB")
    now_s, leads = START_S, True
    telemetry = RecorderTelemetry(CollectorRegistry())
    recorder = Recorder(
        fleet.observed,
        api,  # type: ignore[arg-type]
        api,  # type: ignore[arg-type]
        lambda: leads,
        telemetry,
        lambda: now_s,
    )

    async def play() -> None:
        nonlocal now_s
        for number in range(rounds):
            began, wrote = time.process_time(), api.writes
            await recorder.round()
            spent = time.process_time() - began
            typer.echo(
                f"round {number}: {spent:.2f} s of CPU, {api.writes - wrote} writes, "
                f"{rss_mib() - before:.0f} MiB"
            )
            now_s += 15.0
            fleet.churn(churned, now_s)

    asyncio.run(play())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    typer.echo(f"highest memory of the process: {peak:.0f} MiB, {len(api.profiles):,} profiles")


if __name__ == "__main__":
    typer.run(main)
