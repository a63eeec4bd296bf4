"""Which pods arrive: the published mix of a production GPU cluster, generated, not copied.

Counts and quantiles are those of Alibaba's openb trace (ATC'23, default list) with the VRAM
mapping that our notes describe; the trace itself stays outside the repository. The seed is fixed,
so that everybody sees the same pods in the same order.
"""

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

#: Pods that share one GPU, then (whole GPUs asked for, pods).
PUBLISHED_SHARING = 3078
PUBLISHED_WHOLE = ((1, 3911), (2, 16), (4, 15), (8, 44))
PUBLISHED_PODS = PUBLISHED_SHARING + sum(pods for _, pods in PUBLISHED_WHOLE)
#: (percentile, MiB) of what sharing pods ask for: min, p5, p25, p50, p75, p95, max.
QUANTILES = ((0, 755), (5, 4834), (25, 7595), (50, 10683), (75, 18412), (95, 26333), (100, 65813))


@dataclass(frozen=True)
class DemoPod:
    """One pod: VRAM on a share of one device, or whole devices."""

    name: str
    #: Whole GPUs, or 1 for a pod that shares.
    devices: int
    #: None for a pod that takes whole GPUs and annotates nothing.
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
        """The pod as kube-scheduler sends it, with the fields that a minimal one carries."""
        return msgspec.json.encode(_body(self))


@dataclass(frozen=True, slots=True)
class Workload:
    pods: tuple[DemoPod, ...]

    @property
    def sharing_mib(self) -> list[int]:
        return [pod.vram_mib for pod in self.pods if pod.vram_mib is not None]

    @property
    def median_mib(self) -> int:
        """What a typical sharing pod asks for; 0 where none shares."""
        return median_low(self.sharing_mib) if self.sharing_mib else 0

    @property
    def whole_gpus(self) -> int:
        return sum(pod.devices for pod in self.pods if pod.vram_mib is None)

    def first(self, count: int | None) -> "Workload":
        return self if count is None else Workload(self.pods[:count])


def published(pods: int) -> Workload:
    """``pods`` pods in the published proportions and with the published quantiles."""
    sharing, *whole = apportion(pods, [PUBLISHED_SHARING, *(count for _, count in PUBLISHED_WHOLE)])
    asks: list[tuple[int, int | None]] = [(1, quantile_mib(i, sharing)) for i in range(sharing)]
    for (devices, _), count in zip(PUBLISHED_WHOLE, whole, strict=True):
        asks += [(devices, None)] * count
    return in_random_order(asks)


def in_random_order(asks: Sequence[tuple[int, int | None]]) -> Workload:
    """Pods for (devices, MiB or None), in an order that the fixed seed decides."""
    shuffled = random.Random(SEED).sample(asks, len(asks))
    return Workload(
        tuple(
            DemoPod(f"{'train' if vram is None else 'infer'}-{i:04d}", devices, vram)
            for i, (devices, vram) in enumerate(shuffled)
        )
    )


def quantile_mib(i: int, count: int) -> int:
    """What the i-th smallest of ``count`` pods asks for: straight lines between the quantiles."""
    # The middle of the i-th of ``count`` equal parts, as percent = numerator / denominator.
    numerator, denominator = (2 * i + 1) * 100, 2 * count
    for (low, from_mib), (high, to_mib) in pairwise(QUANTILES):
        if numerator <= high * denominator:
            way = (to_mib - from_mib) * (numerator - low * denominator)
            return from_mib + way // ((high - low) * denominator)
    raise AssertionError("the last quantile is 100 percent")


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide ``total`` in proportion to ``weights``: whole parts, the largest remainders first."""
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
