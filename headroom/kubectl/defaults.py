"""Suggests a default request for each namespace, from the measured use of its pods. Only pure
functions.

``/v1/drift`` lists the running pods with their maximum use since the containers started. It does
not list pods that have ended."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headroom.contract.annotations import DEFAULT_VRAM
from headroom.contract.commands import command, commented
from headroom.contract.quantity import format_bytes, gib
from headroom.kubectl.top import age, counted

#: If fewer than ``ENOUGH_PODS`` pods ran for ``LONG_S`` seconds, the command for the namespace is
#: only a comment.
ENOUGH_PODS, LONG_S = 3, 3600
#: A suggestion is the largest use of a pod plus this percentage, rounded up to a multiple of
#: ``STEP_BYTES``.
MARGIN_PERCENT = 10
STEP_BYTES = 256 << 20

_HEAD = (
    f"# The largest use of a GPU by a running pod since it started, plus {MARGIN_PERCENT} %.",
    "# Pods that have ended do not count.",
    "# Check the amounts, then run the lines. A namespace that already has a default keeps it.",
)


@dataclass(frozen=True, slots=True)
class _Pod:
    namespace: str
    #: The use of the pod in bytes, or None if it was not measured.
    used_bytes: int | None
    #: For how long the pod has been on its node, or None if this is not known.
    runs_s: float | None


def lines(body: Mapping[str, Any], namespace: str | None) -> list[str]:
    """Return a script of ``kubectl annotate`` with comments, from the body of ``/v1/drift``.

    ``namespace`` restricts the result to one namespace; None includes all. The script is empty if
    no pod has a GPU there."""
    now_s = _seconds(body["generated_at"])
    pods: dict[str, list[_Pod]] = {}
    for each in body["pods"]:
        if namespace in (None, each["namespace"]):
            runs_s = now_s - _seconds(each["since"]) if each["since"] else None
            pod = _Pod(each["namespace"], used_bytes(each), runs_s)
            pods.setdefault(pod.namespace, []).append(pod)
    if not pods:
        return []
    return [*_HEAD, *(line for name in sorted(pods) for line in _namespace(name, pods[name]))]


def used_bytes(pod: Mapping[str, Any]) -> int | None:
    """Return the largest use of one device by the pod, or None if it was not measured.

    The result is the peak, or the current use if the agent reports no peak. All suggestions depend
    on this figure alone.
    """
    measured = [
        device[key]
        for device in pod["observed"]
        for key in ("measured_bytes", "peak_bytes")
        if device[key] is not None
    ]
    return max(measured, default=None)


def suggested_bytes(most_bytes: int) -> int:
    """Return the default request for pods that use at most ``most_bytes`` on a device."""
    with_margin = -(-most_bytes * (100 + MARGIN_PERCENT) // 100)
    return max(1, -(-with_margin // STEP_BYTES)) * STEP_BYTES


def _namespace(name: str, pods: Iterable[_Pod]) -> Iterator[str]:
    measured = [(pod.used_bytes, pod.runs_s) for pod in pods if pod.used_bytes is not None]
    without = len(list(pods)) - len(measured)
    if not measured:
        yield commented(f"{name}: the use of {counted(without, 'pod')} is not measured")
        return
    most_bytes = max(used for used, _ in measured)
    ages_s = [runs_s for _, runs_s in measured if runs_s is not None]
    text = f"{name}: {counted(len(measured), 'pod')}, at most {gib(most_bytes)}"
    if ages_s:
        text += f", running for {_span(min(ages_s), max(ages_s))}"
    if without:
        text += f"; {counted(without, 'pod')} without a measurement"
    yield commented(text)
    default = f"{DEFAULT_VRAM}={format_bytes(suggested_bytes(most_bytes))}"
    line = command("kubectl", "annotate", "namespace", name, default)
    if sum(each_s >= LONG_S for each_s in ages_s) >= ENOUGH_PODS:
        yield line
    else:
        yield commented(
            f"Not enough data: fewer than {ENOUGH_PODS} pods have run for {LONG_S / 3600:g} hour. "
            "Remove the # to use the line anyway."
        )
        yield commented(line)


def _span(least_s: float, most_s: float) -> str:
    shortest, longest = age(least_s), age(most_s)
    return shortest if shortest == longest else f"{shortest} to {longest}"


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
