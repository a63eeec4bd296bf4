"""Decides which devices are fenced, why, since when, and what proves them well again. Pure.

Most causes are there to be read at every sample, and end with the sample that no longer shows them:

    lost, reset required, calls that hang or fail        the calls are answered again
    the driver asks for a recovery                        it asks for none
    row remaps pending or failed, pages pending          the driver says so no longer
    uncorrectable ECC errors since the driver loaded     the counter is zero again: reset or reload

An XID is told once, to whoever listens, and leaves nothing behind that could be read. If the driver
tells which recovery it wants (from 565 on, see docs/agent.md), that decides: an XID makes the
device unhealthy for the sample in which it came, and from then on only the recovery that the driver
asks for does. If the driver does not tell, the XID is remembered, across restarts of the agent too,
until the driver was loaded again (its module or its version is another, or the machine's boot is)
or maintenance of the node has ended.

XIDs in ``HARMLESS`` never make a device unhealthy. A device that fails takes all its MIG devices
with it. An XID of a device that the driver does not name counts for every device, as in NVIDIA's
plugin.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

#: XIDs after which the device works: number -> what it says. The first five are those of NVIDIA's
#: device plugin (internal/rm/health.go, v0.18); the others have no action for the GPU in NVIDIA's
#: catalog of XIDs (docs.nvidia.com/deploy/xid-errors, analyzing-xid-catalog). The plugin has 109 as
#: well; in the catalog it takes a reset.
HARMLESS = {
    13: "an exception in the graphics engine, by the application",
    31: "a memory page fault, by the application",
    43: "a channel was reset, by the application",
    45: "a channel was removed after another error",
    68: "an exception in the video processor, by the application",
    63: "a row remap was recorded; the check of pending remaps tells whether it takes a reset",
    92: "many single-bit errors, which were corrected",
    94: "a contained memory error, which ended the application",
    121: "a corrected error of the link between CPU and GPU",
    154: "the recovery that the driver asks for has changed, which is read itself",
}

#: What the API server takes; more, and it would refuse the whole report.
_MOST_REASON = 1000
#: More would not fence it better.
_MOST_XIDS = 16

#: nvmlDeviceGpuRecoveryAction_t of r615 (nvidia-ml-py 13.615.71); 0 is none. In the first 580
#: drivers (13.580.65) 5 was a bus reset, which later ones number 6.
_RECOVERIES = {
    1: "a GPU reset",
    2: "a reboot of the node",
    3: "its peer-to-peer traffic to be drained",
    4: "a drain and a GPU reset",
    5: "a recovery of the IMEX domain (before 590: a bus reset)",
    6: "a bus reset",
    7: "a reboot of the system",
}
#: Those that reset the GPU; a reboot does not wait for us.
_RESETS = frozenset({1, 4, 6})


@dataclass(frozen=True, slots=True)
class Checkup:
    """What the driver says of the state of one physical GPU; None where it does not tell."""

    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    #: What it asks for, by NVML's number; 0: nothing.
    recovery: int | None = None

    @property
    def needs_reset(self) -> bool:
        """Whether the driver asks for what no process may have the device open for."""
        return self.recovery in _RESETS

    @property
    def causes(self) -> list[str]:
        """Constant while the cause is: a count would be written with every error."""
        found = []
        if self.recovery:
            found.append(f"driver asks for {_RECOVERIES.get(self.recovery, 'a recovery')}")
        if self.uncorrected_errors:
            found.append("uncorrectable ECC errors since the driver was loaded")
        if self.remap_failed:
            found.append("a row remap failed")
        if self.remap_pending:
            found.append("a row remap is pending, which takes a GPU reset")
        if self.pages_pending:
            found.append("page retirement is pending, which takes a GPU reset")
        return found


@dataclass(frozen=True, slots=True)
class Xid:
    #: Of the physical GPU; None where the driver does not name it.
    uuid: str | None
    number: int
    source: str


class Patient(msgspec.Struct, frozen=True):
    """What is remembered of a device that is fenced."""

    since: str
    #: "79 (nvml)"; none where nothing but the samples speaks against it.
    xids: list[str] = msgspec.field(default_factory=list)


class Memory(msgspec.Struct, frozen=True):
    """All that has to survive a restart of the agent."""

    #: Which load of which driver this is about; empty: none has been seen yet.
    driver: str = ""
    patients: dict[str, Patient] = msgspec.field(default_factory=dict)
    #: uuid -> the last XID in DCGM's gauge, which keeps it until the exporter is restarted.
    gauges: dict[str, int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sight:
    """One sample, by physical GPU."""

    #: RFC 3339.
    now: str
    #: Empty where no driver answers.
    driver: str
    #: What speaks against each device that is there now; empty: nothing.
    causes: Mapping[str, list[str]]
    checkups: Mapping[str, Checkup] = field(default_factory=dict)
    #: Events since the last sample.
    xids: Iterable[Xid] = ()
    #: DCGM's gauge; 0: none yet.
    gauges: Mapping[str, int] = field(default_factory=dict)
    #: Whether maintenance of the node has just ended.
    maintained: bool = False


@dataclass(frozen=True, slots=True)
class HealthIssue:
    reason: str
    since: str


def judge(before: Memory, sight: Sight) -> tuple[Memory, dict[str, HealthIssue]]:
    """What is to be remembered now, and the devices of ``sight`` that are fenced."""
    reloaded = before.driver != "" and sight.driver not in {"", before.driver}
    raised = _raised(before, sight)
    patients: dict[str, Patient] = {}
    health_issues: dict[str, HealthIssue] = {}
    for uuid in {*before.patients, *sight.causes}:
        known = before.patients.get(uuid)
        recovery = sight.checkups[uuid].recovery if uuid in sight.checkups else None
        well_again = reloaded or sight.maintained or recovery == 0
        xids = [] if known is None or well_again else list(known.xids)
        xids += [text for text in raised.get(uuid, ()) if text not in xids]
        xids = xids[:_MOST_XIDS]
        if uuid not in sight.causes:
            if known is not None and xids:  # not there now: what it did is not forgiven
                patients[uuid] = Patient(known.since, xids)
            continue
        reasons = [*sight.causes[uuid], *([_reason(xids, recovery)] if xids else [])]
        if reasons:
            since = sight.now if known is None else known.since
            patients[uuid] = Patient(since, xids)
            health_issues[uuid] = HealthIssue("; ".join(reasons)[:_MOST_REASON], since)
    return Memory(
        sight.driver or before.driver, patients, {**before.gauges, **sight.gauges}
    ), health_issues


def _raised(before: Memory, sight: Sight) -> dict[str, list[str]]:
    """uuid -> its new XIDs that count, as they are remembered."""
    gauged = [
        Xid(uuid, number, "dcgm")
        for uuid, number in sight.gauges.items()
        # Edges only: the gauge still shows what was long repaired, and the first time it is seen
        # that may be years ago.
        if number != before.gauges.get(uuid, number)
    ]
    found: dict[str, list[str]] = {}
    for xid in (*sight.xids, *gauged):
        if xid.number > 0 and xid.number not in HARMLESS:
            for uuid in sight.causes if xid.uuid is None else [xid.uuid]:
                texts = found.setdefault(uuid, [])
                if (text := f"{xid.number} ({xid.source})") not in texts:
                    texts.append(text)
    return found


def _reason(xids: list[str], recovery: int | None) -> str:
    until = "the GPU is reset or the driver loaded anew"
    if recovery is not None:
        until = "the driver asks for no recovery"
    return f"XID {', '.join(xids)}: unhealthy until {until}"
