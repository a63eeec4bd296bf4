"""Decides which devices are unhealthy, why, since when, and when they are healthy again. Pure.

Every sample can observe most causes. Such a cause ends with the first sample that does not show it:

    lost, reset required, calls that hang or fail        the calls succeed again
    the driver asks for a recovery                        it asks for none
    row remaps pending or failed, pages pending          the driver does not report them any more
    uncorrectable ECC errors since the driver loaded     the counter is zero again: reset or reload;
                                                         no cause if the driver reports recoveries

An XID is an event, which the driver reports only once and which cannot be read later. There are two
cases:

* The driver reports which recovery it needs (from 565 on, see docs/design/agent.md). In this case
  an XID makes the device unhealthy for only one sample. After that, the requested recovery decides.
* The driver does not report recoveries. In this case the XID is remembered, even across restarts of
  the agent, until the driver is loaded again (another module load, version or boot) or the node's
  maintenance ends.

XIDs in ``HARMLESS`` never make a device unhealthy. All MIG devices of an unhealthy device are
unhealthy too. An XID without a device counts for every device, as in NVIDIA's plugin.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from agent.probes.cause import Cause, code_of
from agent.probes.readings import HealthIssueReading

#: XIDs after which the device still works, with their meanings. NVIDIA's device plugin ignores the
#: first five too (internal/rm/health.go, v0.18). The others need no action for the GPU according to
#: NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors, analyzing-xid-catalog). The plugin also
#: ignores 109, but the catalog requires a reset for it.
HARMLESS = {
    13: "an exception in the graphics engine, by the application",
    31: "a memory page fault, by the application",
    43: "a channel was reset, by the application",
    45: "a channel was removed after another error",
    68: "an exception in the video processor, by the application",
    63: "a row remap was recorded; the check of pending remaps shows whether it takes a reset",
    92: "many single-bit errors, which were corrected",
    94: "a contained memory error, which ended the application",
    121: "a corrected error of the link between CPU and GPU",
    154: "the recovery that the driver asks for has changed, which is read separately",
}

#: Maximum length of a reason in characters. The API server rejects reports with longer reasons.
_MOST_REASON_CHARS = 1000
#: Maximum number of XIDs remembered for one device.
_MOST_XIDS = 16

#: Texts for nvmlDeviceGpuRecoveryAction_t of r615 (nvidia-ml-py 13.615.71), where 0 means none. In
#: the first drivers of branch 580 (nvidia-ml-py 13.580.65), action 5 was a bus reset. In later
#: drivers, a bus reset is action 6.
_RECOVERIES = {
    1: "a GPU reset",
    2: "a reboot of the node",
    3: "its peer-to-peer traffic to be drained",
    4: "a drain and a GPU reset",
    5: "a recovery of the IMEX domain (before 590: a bus reset)",
    6: "a bus reset",
    7: "a reboot of the system",
}
#: Recoveries that reset the GPU, which is possible only if no process has it open.
_RESETS = frozenset({1, 4, 6})


@dataclass(frozen=True, slots=True)
class Checkup:
    """Health of one physical GPU as the driver reports it. Values that are not reported are
    None."""

    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    #: NVML's number of the recovery that the driver requests, or 0 if it requests none.
    recovery: int | None = None

    @property
    def needs_reset(self) -> bool:
        """Whether the driver asks for a reset, during which no process may have the device open."""
        return self.recovery in _RESETS

    @property
    def causes(self) -> list[Cause]:
        """The reasons why the GPU is unhealthy. Empty if it is healthy.

        The texts contain no counts, because otherwise each new error would cause a write of the
        report.
        """
        found = []
        if self.recovery:
            what = _RECOVERIES.get(self.recovery, "a recovery")
            found.append(Cause(f"driver asks for {what}", "recovery"))
        # Contained errors (XID 94) are counted too. A driver that reports recoveries also reports
        # whether the errors need a recovery.
        if self.uncorrected_errors and self.recovery is None:
            found.append(Cause("uncorrectable ECC errors since the driver was loaded", "ecc"))
        if self.remap_failed:
            found.append(Cause("a row remap failed", "remap"))
        if self.remap_pending:
            found.append(Cause("a row remap is pending, which requires a GPU reset", "remap"))
        if self.pages_pending:
            why = "page retirement is pending, which requires a GPU reset"
            found.append(Cause(why, "retirement"))
        return found


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID event."""

    #: UUID of the physical GPU, or None if the driver does not report it.
    uuid: str | None
    number: int
    #: The source of the XID, which is nvml or dcgm.
    source: str


class UnhealthyDevice(msgspec.Struct, frozen=True):
    """The remembered state of an unhealthy physical GPU."""

    #: When the GPU became unhealthy (RFC 3339).
    since: str
    #: XIDs with their source, such as "79 (nvml)". Empty if every sample can observe all causes.
    xids: list[str] = msgspec.field(default_factory=list)


class HealthState(msgspec.Struct, frozen=True):
    """The state that survives a restart of the agent, stored in the file of ``--state``."""

    #: An identifier of the driver version and the module load. Empty if no driver has answered yet.
    driver: str = ""
    #: State of each unhealthy device, by UUID.
    unhealthy: dict[str, UnhealthyDevice] = msgspec.field(default_factory=dict, name="patients")
    #: The last XID in each gauge. DCGM keeps it until the exporter restarts.
    gauges: dict[str, int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HealthSample:
    """The health data of one sample, by UUID of the physical GPU."""

    #: The time of the sample (RFC 3339).
    now: str
    #: An identifier of the driver version and the module load. Empty if no driver answers.
    driver: str
    #: Why each present device is unhealthy. Empty for a healthy device.
    causes: Mapping[str, list[str]]
    checkups: Mapping[str, Checkup] = field(default_factory=dict)
    #: XID events since the last sample.
    xids: Iterable[Xid] = ()
    #: DCGM's gauges of the last XID, which are 0 if there was no XID yet. Each GPU instance has its
    #: own gauge, so the key is the UUID of the GPU, or UUID/number for an instance.
    gauges: Mapping[str, int] = field(default_factory=dict)
    #: Whether maintenance of the node has just ended.
    maintained: bool = False


def judge(
    before: HealthState, sample: HealthSample
) -> tuple[HealthState, dict[str, HealthIssueReading]]:
    """Return the state to remember, and the health issue of each unhealthy present device by UUID.

    ``before`` is the state that the previous call returned.
    """
    reloaded = before.driver != "" and sample.driver not in {"", before.driver}
    new_xids = _new_xids(before, sample)
    unhealthy: dict[str, UnhealthyDevice] = {}
    health_issues: dict[str, HealthIssueReading] = {}
    for uuid in {*before.unhealthy, *sample.causes}:
        known = before.unhealthy.get(uuid)
        recovery = sample.checkups[uuid].recovery if uuid in sample.checkups else None
        recovered = reloaded or sample.maintained or recovery == 0
        xids = [] if known is None or recovered else list(known.xids)
        xids += [text for text in new_xids.get(uuid, ()) if text not in xids]
        xids = xids[:_MOST_XIDS]
        if uuid not in sample.causes:
            if known is not None and xids:  # The device is missing now, so keep its XIDs.
                unhealthy[uuid] = UnhealthyDevice(known.since, xids)
            continue
        reasons = [*sample.causes[uuid], *([_reason(xids, recovery)] if xids else [])]
        if reasons:
            since = sample.now if known is None else known.since
            unhealthy[uuid] = UnhealthyDevice(since, xids)
            codes = dict.fromkeys(code_of(reason) or "other" for reason in reasons)
            health_issues[uuid] = HealthIssueReading(
                uuid, "; ".join(reasons)[:_MOST_REASON_CHARS], since, tuple(codes)
            )
    return HealthState(
        sample.driver or before.driver, unhealthy, {**before.gauges, **sample.gauges}
    ), health_issues


def _new_xids(before: HealthState, sample: HealthSample) -> dict[str, list[str]]:
    """Return the new XIDs that make a device unhealthy, with their sources, by UUID."""
    gauged = [
        Xid(gauge.partition("/")[0], number, "dcgm")
        for gauge, number in sample.gauges.items()
        # Only changes count. The gauge still shows an XID after the repair, so the first value that
        # the agent sees may be old.
        if number != before.gauges.get(gauge, number)
    ]
    found: dict[str, list[str]] = {}
    for xid in (*sample.xids, *gauged):
        if xid.number > 0 and xid.number not in HARMLESS:
            for uuid in sample.causes if xid.uuid is None else [xid.uuid]:
                texts = found.setdefault(uuid, [])
                if (text := f"{xid.number} ({xid.source})") not in texts:
                    texts.append(text)
    return found


def _reason(xids: list[str], recovery: int | None) -> Cause:
    """Return the reason for these XIDs, with the condition that ends it."""
    until = "the GPU is reset or the driver is loaded again"
    if recovery is not None:
        until = "the driver asks for no recovery"
    return Cause(f"XID {', '.join(xids)}: unhealthy until {until}", "xid")
