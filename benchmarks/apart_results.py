"""Results of ``benchmarks.apart`` as data and text, compared with an idle echo server."""

import msgspec
import typer

from benchmarks.hotpath.calling import Spread, spread

SCHEMA = "headroom.apart/v1"
VERBS = ("filter", "prioritize", "bind")
PARTS = ("extender", "console", "webhook")
MOST_RATIO = 1.5
#: Seconds between two pods.
PAUSE_S = 0.02
LATE_S = 0.005


class Phase(msgspec.Struct, frozen=True):
    name: str
    #: Number of reports of each agent per second.
    reports_per_s: float = 0.0
    bursts: bool = False
    read: bool = False
    flooded: bool = False


IDLE = Phase("idle")
PHASES = (
    IDLE,
    Phase("growing", 1 / 5),
    Phase("freeing", 1.0),
    Phase("bursts", bursts=True),
    Phase("read", read=True),
    Phase("flooded", flooded=True),
    Phase("everything", 1 / 5, read=True, flooded=True),
)


class Beside(msgspec.Struct):
    """One verb, and its echo in the same phase."""

    verb: Spread
    echo: Spread
    ratio_p50: float
    ratio_p99: float
    #: Growth of the p99 from idle to this phase, relative to the growth of the echo's p99.
    growth_p99: float


class Stalls(msgspec.Struct):
    """Number of scheduled runs of an event loop, and of runs that were over 5 ms late."""

    samples: int = 0
    late: int = 0

    def since(self, before: "Stalls") -> "Stalls":
        return Stalls(self.samples - before.samples, self.late - before.late)


class Found(msgspec.Struct):
    """All rounds of one phase."""

    phase: str
    calls: int
    verbs: dict[str, Beside]
    stalls: Stalls
    echo_stalls: Stalls
    #: Process -> ratio of a core, and resident MiB at the end.
    cpu_ratio: dict[str, float]
    resident_mib: dict[str, float]


class Results(msgspec.Struct):
    schema: str
    machine: str
    cores: int
    versions: dict[str, str]
    seed: int
    nodes: int
    pods_per_device: int
    seconds: float
    rounds: int
    quotas: dict[str, float]
    #: Seconds from the order for a burst until the console shows the last node that reports.
    burst_shown_in_s: float
    phases: list[Found]


class Samples(msgspec.Struct):
    verbs: dict[str, list[int]] = msgspec.field(default_factory=lambda: {v: [] for v in VERBS})
    echoes: dict[str, list[int]] = msgspec.field(default_factory=lambda: {v: [] for v in VERBS})
    stalls: Stalls = msgspec.field(default_factory=Stalls)
    echo_stalls: Stalls = msgspec.field(default_factory=Stalls)
    cpu_s: dict[str, float] = msgspec.field(default_factory=dict)
    resident_mib: dict[str, float] = msgspec.field(default_factory=dict)
    took_s: float = 0.0


def finding(name: str, of: Samples, idle: Samples) -> Found:
    return Found(
        phase=name,
        calls=len(of.verbs["filter"]),
        verbs={verb: _beside(verb, of, idle) for verb in VERBS},
        stalls=of.stalls,
        echo_stalls=of.echo_stalls,
        cpu_ratio={part: round(spent / of.took_s, 3) for part, spent in of.cpu_s.items()},
        resident_mib={part: round(mib, 1) for part, mib in of.resident_mib.items()},
    )


def _beside(verb: str, of: Samples, idle: Samples) -> Beside:
    took, echoed = spread(of.verbs[verb]), spread(of.echoes[verb])
    grown = took.p99_ms / spread(idle.verbs[verb]).p99_ms
    echo_grown = echoed.p99_ms / spread(idle.echoes[verb]).p99_ms
    return Beside(
        verb=took,
        echo=echoed,
        ratio_p50=round(took.p50_ms / echoed.p50_ms, 2),
        ratio_p99=round(took.p99_ms / echoed.p99_ms, 2),
        growth_p99=round(grown / echo_grown, 2),
    )


def show(found: Results) -> None:
    typer.echo(
        f"{found.machine}, {found.cores} cores; {found.nodes} nodes of 8 GPUs with "
        f"{found.pods_per_device} pods each, {found.rounds} rounds of {found.seconds:g} s; "
        f"cores: {found.quotas or 'without quotas'}"
    )
    row = "{:<12}{:<11}{:>6}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}  {}"
    head = "phase", "verb", "calls", "p50 ms", "p99 ms", "echo p50", "p99", "ratio", "p99", "growth"
    typer.echo(row.format(*head, f"goal {MOST_RATIO}"))
    for of in found.phases:
        for verb, each in of.verbs.items():
            typer.echo(
                row.format(
                    of.phase,
                    verb,
                    of.calls,
                    f"{each.verb.p50_ms:.2f}",
                    f"{each.verb.p99_ms:.2f}",
                    f"{each.echo.p50_ms:.2f}",
                    f"{each.echo.p99_ms:.2f}",
                    each.ratio_p50,
                    each.ratio_p99,
                    each.growth_p99,
                    "met" if each.growth_p99 <= MOST_RATIO else "NOT MET",
                )
            )
        ours, echoed = of.stalls, of.echo_stalls
        held = ", ".join(
            f"{part} {of.cpu_ratio[part]:.2f} cores {of.resident_mib[part]:.0f} MiB"
            for part in PARTS
        )
        typer.echo(
            f"  over 5 ms late: {ours.late} of {ours.samples}, "
            f"echo {echoed.late} of {echoed.samples}; {held}"
        )
    typer.echo(f"the console shows a burst within {found.burst_shown_in_s} s")
