"""The demo's pods: generated with the published proportions of a production GPU cluster.

Counts and quantiles come from Alibaba's openb trace (ATC'23, default list), with GPU shares
converted to MiB. The trace itself is not in the repository. The seed is fixed, so each run has the
same pods in the same order."""

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median_low

import msgspec

MIB = 1 << 20
NAMESPACE = "demo"
CONTAINER = "main"
SHARED = "nvidia.com/gpu.shared"
WHOLE = "nvidia.com/gpu"
SEED = 20231

#: Number of pods that share one GPU.
PUBLISHED_SHARING = 3078
#: (whole GPUs per pod, number of pods).
PUBLISHED_WHOLE = ((1, 3911), (2, 16), (4, 15), (8, 44))
PUBLISHED_PODS = PUBLISHED_SHARING + sum(pods for _, pods in PUBLISHED_WHOLE)
#: (percentile, MiB) of the requests of sharing pods: minimum, p5, p25, p50, p75, p95, maximum.
QUANTILES = ((0, 755), (5, 4834), (25, 7595), (50, 10683), (75, 18412), (95, 26333), (100, 65813))


@dataclass(frozen=True)
class DemoPod:
    """A pod that shares one device or takes whole devices."""

    name: str
    #: Number of whole GPUs, or 1 for a pod that shares a GPU.
    devices: int
    #: Requested memory, or None for a pod that takes whole GPUs and has no annotation.
    vram_mib: int | None

    @property
    def resource(self) -> str:
        return WHOLE if self.vram_mib is None else SHARED

    @property
    def request_bytes(self) -> int | None:
        return None if self.vram_mib is None else self.vram_mib * MIB

    @property
    def uid(self) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_DNS, self.name))

    @cached_property
    def body(self) -> bytes:
        """The pod as JSON, with the fields of a minimal pod as kube-scheduler sends it."""
        return msgspec.json.encode(_body(self))


@dataclass(frozen=True, slots=True)
class Workload:
    pods: tuple[DemoPod, ...]

    @property
    def sharing_mib(self) -> list[int]:
        return [pod.vram_mib for pod in self.pods if pod.vram_mib is not None]

    @property
    def median_mib(self) -> int:
        """The median request of the sharing pods, or 0 if no pod shares."""
        return median_low(self.sharing_mib) if self.sharing_mib else 0

    @property
    def whole_gpus(self) -> int:
        return sum(pod.devices for pod in self.pods if pod.vram_mib is None)

    def first(self, count: int | None) -> "Workload":
        return self if count is None else Workload(self.pods[:count])


def published(pods: int) -> Workload:
    """Return ``pods`` pods with the published proportions and quantiles."""
    sharing, *whole = apportion(pods, [PUBLISHED_SHARING, *(count for _, count in PUBLISHED_WHOLE)])
    requests: list[tuple[int, int | None]] = [(1, quantile_mib(i, sharing)) for i in range(sharing)]
    for (devices, _), count in zip(PUBLISHED_WHOLE, whole, strict=True):
        requests += [(devices, None)] * count
    return in_random_order(requests)


def in_random_order(requests: Sequence[tuple[int, int | None]]) -> Workload:
    """Return a pod for each (devices, MiB or None), in an order that the fixed seed decides."""
    shuffled = random.Random(SEED).sample(requests, len(requests))
    return Workload(
        tuple(
            DemoPod(f"{'train' if vram is None else 'infer'}-{i:04d}", devices, vram)
            for i, (devices, vram) in enumerate(shuffled)
        )
    )


def quantile_mib(i: int, count: int) -> int:
    """Return the request of the i-th smallest of ``count`` pods, interpolated linearly."""
    # The middle of the i-th of ``count`` equal parts, as percent = numerator / denominator.
    numerator, denominator = (2 * i + 1) * 100, 2 * count
    for (low, from_mib), (high, to_mib) in pairwise(QUANTILES):
        if numerator <= high * denominator:
            rise = (to_mib - from_mib) * (numerator - low * denominator)
            return from_mib + rise // ((high - low) * denominator)
    raise AssertionError("the last quantile is 100 percent")


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide ``total`` into integers in proportion to ``weights`` (largest remainder method)."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _body(pod: DemoPod) -> dict[str, object]:
    metadata: dict[str, object] = {
        "name": pod.name,
        "namespace": NAMESPACE,
        "uid": pod.uid,
        "resourceVersion": "1",
        "creationTimestamp": "2026-11-21T08:00:00Z",
        "labels": {"app": pod.name.split("-")[0]},
    }
    if pod.vram_mib is not None:
        metadata["annotations"] = {"headroom.gpu/vram": f"{pod.vram_mib}Mi"}
    amounts = {pod.resource: str(pod.devices)}
    return {
        "metadata": metadata,
        "spec": {
            "containers": [
                {
                    "name": CONTAINER,
                    "image": "registry.example/model:1",
                    "resources": {"limits": amounts, "requests": amounts},
                    "terminationMessagePath": "/dev/termination-log",
                    "terminationMessagePolicy": "File",
                    "imagePullPolicy": "IfNotPresent",
                }
            ],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default",
            "securityContext": {},
            "schedulerName": "default-scheduler",
            "priority": 0,
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }
