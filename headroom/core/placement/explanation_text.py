"""Renders the explanation of a node as lines of text."""

from collections.abc import Sequence

from headroom.contract.annotations import PROCESSES
from headroom.contract.commands import command
from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.placement.device_reading import Activity
from headroom.core.placement.explain import DeviceExplanation, NodeExplanation


def explanation_lines(node: NodeExplanation) -> list[str]:
    """Return lines with the headline, the details, the candidate devices, the score and the gate.

    Candidates with equal text share their lines. Devices are omitted if they are irrelevant.
    """
    lines = [f"{node.node}: {node.reason.sentence if node.reason else _fits(node)}"]
    lines += [f"  {text}" for text in (node.detail, node.unmeasured) if text]
    if not node.closed and node.reason is not Reason.NO_SUCH_RESOURCE:
        uuids_of: dict[tuple[str, ...], list[str]] = {}
        for device in node.candidates:
            text = _device_lines(device, node.node, measured=not node.unmeasured)
            if node.reason is None or node.max_sm_ppm is not None:  # SM activity matters
                text += _sm_activity(device.terms.activity, node.max_sm_ppm)
            uuids_of.setdefault(tuple(text), []).append(device.terms.device.uuid)
        for (first, *others), uuids in uuids_of.items():
            lines += [f"  {_named(uuids)}: {first}", *others]
    if node.score is not None:
        terms = ", ".join(f"{name} {value:.2f}" for name, value in node.terms.items())
        lines.append(f"  score {node.score:.2f}: {terms}")
    if node.gated and node.reason is None:
        lines.append("  the gate lets the pod start only if its device has enough free memory")
    return lines


def _named(uuids: Sequence[str]) -> str:
    """Return the uuid of a single device, or the number of devices and one uuid."""
    return uuids[0] if len(uuids) == 1 else f"each of {len(uuids)} GPUs, such as {uuids[0]}"


def _fits(node: NodeExplanation) -> str:
    """Return the headline for a node on which the pod fits."""
    if node.by_dra:
        return "fits if kube-scheduler finds a free device, because DRA allocates GPUs of the node"
    if node.chosen_by_pod:
        return "fits, on any device that the pod makes visible to itself"
    count = len(node.candidates)
    if node.chosen_by_headroom and count > 1:
        return f"fits, on {count} GPUs that Headroom chooses"
    return "fits, on its only candidate" if count == 1 else f"fits, on any of {count} candidates"


def _device_lines(device: DeviceExplanation, node: str, measured: bool) -> list[str]:
    """Return the lines for one device. The first line follows the device's name."""
    terms = device.terms
    if not terms.believed:
        return [terms.health_detail]
    if terms.cordoned:
        # The detail is set if the annotation names the GPU of a MIG device.
        uuid = (terms.device.parent if terms.health_detail else None) or terms.device.uuid
        undo = command("kubectl", "headroom", "uncordon", node, uuid)
        return [f"cordoned; to undo it: {undo}"]
    if terms.unhealthy is not None:
        state = "closed" if terms.unhealthy is Reason.COMPUTE_MODE else "unhealthy"
        return [f"{state}, {terms.health_detail}"]
    free = f"{gib(device.free_bytes)} free" if device.free_bytes > 0 else "nothing free"
    short = f", {gib(device.short_bytes, up=True)} short" if device.short_bytes else ""
    needs = gib(device.need_bytes, up=True)
    lines = [f"needs {needs}, {free}{short}; {device.because}"]
    if terms.device.sharing == "mps":
        limit_bytes = terms.device.memory_bytes // max(1, terms.device.replicas.total)
        lines.append(
            f"    MPS limits each process to {gib(limit_bytes)}; annotation {PROCESSES} sets the"
            " number of processes per container"
        )
    if measured and not terms.attributed:
        lines.append(
            "    the agent cannot attribute use to pods, so each pod is assumed to use its request"
        )
    return lines


def _sm_activity(activity: Activity | None, max_sm_ppm: int | None) -> list[str]:
    """Return a line with the SM activity and its limit, or no line if both are absent."""
    limit = "" if max_sm_ppm is None else f"; the pod requires less than {max_sm_ppm / 10_000:g} %"
    if activity is None:
        return [f"    SM activity is unknown{limit}"] if limit else []
    if activity.quantile is None or activity.window_s is None:
        source = f"the last sample of the node's agent ({activity.source})"
    else:
        over = f"{activity.quantile:g} quantile of {activity.window_s / 60:g} minutes"
        source = f"the {over} in DCGM's history"
    return [f"    SM activity {100 * activity.ratio:.3g} %, {source}{limit}"]
