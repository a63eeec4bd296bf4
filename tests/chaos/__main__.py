"""Seeded faults on a real API server, and an auditor's findings.

    make chaos ARGS="--seed 1 --minutes 10"

The faults are printed before they happen; the same seed gives the same ones. The exit status is 1
if the auditor found anything.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from tests.chaos.audit import Finding, Tally
from tests.chaos.calls import Call, told
from tests.chaos.mutants import MUTANTS, mutated
from tests.chaos.site import SCHEDULERS, Scale, Site
from tests.chaos.storm import schedule
from tests.chaos.weather import Weather
from tests.controlplane import ROOT, built, control_plane

#: Maximum time without an improvement after the faults, with default settings: a node becomes
#: stale after 90 s, an orphan is checked after 60 s, the back-off of a requeued pod is 10 s, and so
#: is kube-scheduler's own.
SETTLE_S = 240.0
STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    storm_s: float
    settled_s: float
    faults: dict[str, int]
    requests: dict[str, int]
    deeds: dict[str, int]
    #: kube-scheduler's, before any fault and while only consoles and webhooks had some.
    calls: dict[str, dict[str, str]]
    tally: Tally
    #: Too much on a device, and not our doing.
    excused: list[Finding]
    findings: list[Finding]

    def __str__(self) -> str:
        said = asdict(self)
        for key in ("excused", "findings"):
            said[key] = [str(finding).split("\n") for finding in getattr(self, key)]
        return json.dumps(said, indent=2)


def storm(
    seed: int,
    lasts_s: float,
    scale: Scale,
    say: Callable[[str], None],
    *,
    every_s: float = 4.0,
    settle_s: float = SETTLE_S,
    longest_s: float = 150.0,
    quiet_s: float = 5.0,
    warm_pods: int = 20,
    alone_s: float = 0.0,
    code: Path = ROOT,
    logs: Path | None = None,
    stop_at_finding: bool = False,
) -> Outcome:
    """One storm, from an empty cluster to the verdict; it begins when ``warm_pods`` are bound, and
    for ``alone_s`` with faults of consoles and webhooks alone."""
    with control_plane() as plane:
        site = Site(plane, scale, seed, code)
        try:
            site.start()
            site.clients.start()
            site.until(lambda: site.auditor.tally.bound >= warm_pods, "pods are bound", 120.0)
            faults = schedule(
                seed,
                lasts_s,
                site.targets,
                every_s=every_s,
                longest_s=longest_s,
                alone_s=alone_s,
            )
            weather = Weather(site, faults, say)
            before: list[Call] = site.calls()
            beside: list[Call] | None = None
            began_s = time.monotonic()
            coming = True
            while coming or time.monotonic() < began_s + lasts_s:
                coming = weather.step(time.monotonic() - began_s)
                site.healthy()
                site.keep_up()
                if beside is None and time.monotonic() > began_s + alone_s:
                    beside = site.calls()
                if stop_at_finding and (site.wrong() or site.unlike(before, beside or ())):
                    break
                time.sleep(STEP_S)
            if beside is None:
                beside = site.calls()
            weather.end()
            ended_s = time.monotonic()
            site.clients.stop()
            say("the storm is over; it may settle")
            findings = _settle(site, settle_s, quiet_s, say)
            findings += site.unlike(before, beside)
            return Outcome(
                seed,
                round(ended_s - began_s, 1),
                round(time.monotonic() - ended_s, 1),
                dict(sorted(weather.happened.items())),
                dict(sorted(site.wire({}).items())),
                dict(sorted(site.clients.did.items())),
                {"before the storm": told(before), "beside bystanders": told(beside)},
                site.auditor.tally,
                site.auditor.excused,
                findings,
            )
        finally:
            site.stop()
            if logs is not None:
                site.keep_logs(logs)


def _settle(
    site: Site, within_s: float, quiet_s: float, say: Callable[[str], None]
) -> list[Finding]:
    """The remaining findings if their number has not decreased for ``within_s``, or after three
    times that; none if there were none for ``quiet_s``: the two watches may differ for a moment.
    """
    began_s = better_s = wrong_s = time.monotonic()
    said_s, fewest = float("-inf"), sys.maxsize
    while True:
        site.healthy()
        site.keep_up()
        site.look_everywhere()
        findings = site.wrong(in_the_end=True)
        now_s = time.monotonic()
        if findings:
            wrong_s = now_s
        if len(findings) < fewest:
            fewest, better_s = len(findings), now_s
        if now_s > said_s + 10.0:
            say(f"not as it should be: {dict(Counter(finding.rule for finding in findings))}")
            said_s = now_s
        over = now_s > better_s + within_s or now_s > began_s + 3 * within_s
        if now_s > wrong_s + quiet_s or over or site.wrong():
            return findings
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--alone", type=float, help="minutes of these with only consoles and webhooks; a third"
    )
    parser.add_argument("--nodes", type=int, default=Scale().nodes)
    parser.add_argument("--rate", type=float, default=Scale().rate, help="pods created each second")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the product this way")
    given = parser.parse_args()
    built("etcd", "kube-apiserver", *SCHEDULERS)
    # The agents' log, of a storm: nothing but bad news.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    def say(line: str) -> None:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        sys.stdout.flush()

    with mutated(given.mutant) as code:
        outcome = storm(
            given.seed,
            given.minutes * 60.0,
            Scale(nodes=given.nodes, rate=given.rate),
            say,
            every_s=given.every,
            alone_s=60.0 * (given.minutes / 3 if given.alone is None else given.alone),
            code=code,
            logs=given.logs,
            stop_at_finding=given.mutant is not None,
        )
    say(str(outcome))
    say(f"verdict: {len(outcome.findings)} findings" if outcome.findings else "verdict: sound")
    return bool(outcome.findings)


if __name__ == "__main__":
    sys.exit(main())
