"""Builds bodies of debug API responses for tests of tables."""

from typing import Any

GIB = 1 << 30


def holder(name: str, requested: float, measured: float | None = None, **others: Any) -> Any:
    """Return a pod on a device. Amounts are in GiB. By default, ``observed`` is true."""
    return {
        "namespace": "team-a",
        "name": name,
        "uid": f"uid-{name}",
        "requested_bytes": int(requested * GIB),
        "measured_bytes": None if measured is None else int(measured * GIB),
        "observed": True,
        **others,
    }


def device(index: int = 0, memory: float = 80, reserved: float = 0, **others: Any) -> Any:
    """Return a healthy device. Amounts are in GiB. ``others`` may contain ``used`` and
    ``unattributed``.
    """
    used, unattributed = others.pop("used", 0), others.pop("unattributed", 0)
    return {
        "driver_index": None if index < 0 else index,
        "uuid": f"GPU-{index}",
        "memory_id": f"GPU-{index}",
        "model": "NVIDIA H100 80GB HBM3",
        "sharing": "time-slicing",
        "resource": "nvidia.com/gpu",
        "allocatable_bytes": int(memory * GIB),
        "reserved_total_bytes": int(reserved * GIB),
        "unreserved_pods_bytes": 0,
        "unattributed_bytes": int(unattributed * GIB),
        "used_bytes": int(used * GIB),
        "headroom_bytes": int((memory - reserved - unattributed) * GIB),
        "replicas_free": 3,
        "replicas_allocated": 1,
        "replicas_unhealthy": 0,
        "sm_activity_ratio": None,
        "cordoned": False,
        "unhealthy": None,
        "unhealthy_detail": None,
        "holders": [],
        **others,
    }


def node(name: str, *devices: Any, **others: Any) -> Any:
    """Return a node with these devices."""
    return {
        "name": name,
        "devices": [each | {"memory_id": f"{name}/{each['memory_id']}"} for each in devices],
        "message": None,
        "detail": None,
        "cordoned": False,
        "report_age_s": 12.0,
        "certainty": "predicted",
        "taints": [],
        "overuse": [],
        **others,
    }


def nodes(*found: Any) -> Any:
    return {"nodes": list(found), "continue": None, "remaining": 0}
