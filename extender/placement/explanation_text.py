"""One node's explanation as a few lines to read: what was decided, and what was compared."""

from collections.abc import Sequence

from contract.annotations import PROCESSES
from contract.quantity import gib
from contract.reasons import Reason
from extender.placement.explain import DeviceExplanation, NodeExplanation
from extender.placement.sm_reading import Activity

#: Reasons of the node or the pod as a whole: its devices were not looked at.
_DEVICES_DO_NOT_MATTER = frozenset({Reason.NO_SUCH_RESOURCE, Reason.NOT_PINNED})


def told(node: NodeExplanation) -> list[str]:
    """A headline; what shows it; then, where its devices decide, a line for each candidate."""
    lines = [f"{node.node}: {node.reason.sentence if node.reason else _fits(node)}"]
    lines += [f"  {text}" for text in (node.detail, node.unmeasured) if text]
    if not node.closed and node.reason not in _DEVICES_DO_NOT_MATTER:
        alike: dict[tuple[str, ...], list[str]] = {}
        for device in node.candidates:
            said = _device(device, measured=not node.unmeasured)
            if node.reason is None or node.max_sm_ppm is not None:  # it counts
                said += _busy(device.terms.activity, node.max_sm_ppm)
            alike.setdefault(tuple(said), []).append(device.terms.device.uuid)
        for (first, *others), uuids in alike.items():
            lines += [f"  {_named(uuids)}: {first}", *others]
    if node.score is not None:
        terms = ", ".join(f"{name} {value:.2f}" for name, value in node.terms.items())
        lines.append(f"  score {node.score:.2f}: {terms}")
    if node.gated and node.reason is None:
        lines.append("  its gate lets it start only where the device that it gets has room for it")
    return lines


def _named(uuids: Sequence[str]) -> str:
    """One device by its name, equal ones by their number."""
    return uuids[0] if len(uuids) == 1 else f"each of {len(uuids)} GPUs, such as {uuids[0]}"


def _fits(node: NodeExplanation) -> str:
    if node.chosen_by == "placement":
        return "fits, on the device that Headroom chooses"
    if node.chosen_by == "pod":
        return "fits, on whichever devices the pod makes visible to itself"
    many = len(node.candidates)
    return "fits, on a device that is certain" if many == 1 else f"fits, on any of {many} devices"


def _device(device: DeviceExplanation, measured: bool) -> list[str]:
    """The first line goes on after the device's name."""
    terms = device.terms
    if not terms.believed:
        return [terms.health_detail]
    if terms.health_issue is not None:
        return [f"unhealthy, {terms.health_detail}"]
    left = f"{gib(device.free_bytes)} left" if device.free_bytes > 0 else "nothing left"
    short = f", {gib(device.short_bytes, up=True)} short" if device.short_bytes else ""
    lines = [f"needs {gib(device.need_bytes)}, {left}{short}; {device.because}"]
    if terms.device.sharing == "mps":
        cap_bytes = terms.device.memory_bytes // max(1, terms.device.replicas.total)
        lines.append(
            f"    MPS lets each process take {gib(cap_bytes)}; how many there are in a container, "
            f"{PROCESSES} says"
        )
    if measured and not terms.attributed:
        lines.append(
            "    nobody tells whose memory is in use: what pods asked for is taken for theirs"
        )
    return lines


def _busy(activity: Activity | None, max_sm_ppm: int | None) -> list[str]:
    asked = "" if max_sm_ppm is None else f"; less than {max_sm_ppm / 10_000:g} % is asked for"
    if activity is None:
        return [f"    nobody tells how busy its SMs are{asked}"] if asked else []
    if activity.quantile is None or activity.window_s is None:
        what = f"the last sample of its node's agent ({activity.source})"
    else:
        over = f"{activity.quantile:g} quantile of {activity.window_s / 60:g} minutes"
        what = f"the {over}, by DCGM's history"
    return [f"    SM activity {100 * activity.ratio:.3g} %, {what}{asked}"]
