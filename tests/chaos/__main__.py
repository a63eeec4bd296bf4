"""A storm of faults, drawn from a seed, on a real API server, and an auditor's verdict.

    make chaos ARGS="--seed 1 --minutes 10"

Each fault is printed when it begins; the same seed gives the same ones. The exit status is 1 if the
auditor found anything.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from tests.chaos.audit import Finding
from tests.chaos.faults import Weather, schedule, targets
from tests.chaos.mutants import MUTANTS, mutated
from tests.chaos.site import SCHEDULERS, Scale, Site
from tests.controlplane import ROOT, built, control_plane

#: How long nothing needs to improve after the storm, with default settings: a silent node is stale
#: after 90 s, an orphan is checked after 60 s, a pod requeued without effect waits for 10 s, and so
#: does kube-scheduler's back-off.
SETTLE_S = 240.0


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    settled_s: float
    faults: Mapping[str, int]
    requests: Mapping[str, int]
    actions: Mapping[str, int]
    #: Verb -> number of kube-scheduler's calls while only consoles and webhooks had faults.
    calls: Mapping[str, int]
    tally: Mapping[str, int]
    findings: list[Finding]

    def __str__(self) -> str:
        shown = asdict(self) | {"findings": [str(each).split("\n") for each in self.findings]}
        return json.dumps(shown, indent=2)


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
    """Run one storm in an empty cluster. Faults begin when ``warm_pods`` are bound.

    In the first ``alone_s`` only consoles and webhooks have faults.
    """
    with control_plane() as plane:
        site = Site(plane, scale, seed, code)
        try:
            site.start()
            for client in site.clients:
                client.start()
            site.until(lambda: site.auditor.tally["bound"] >= warm_pods, "pods are bound", 120.0)
            pace = {"every_s": every_s, "longest_s": longest_s, "alone_s": alone_s}
            faults = schedule(seed, lasts_s, targets([*site.nodes]), **pace)
            weather = Weather(site, faults, say)
            before, beside = site.calls(), None
            began_s, incoming = time.monotonic(), True
            while incoming or time.monotonic() < began_s + lasts_s:
                incoming = weather.step(time.monotonic() - began_s)
                site.keep_up()
                if beside is None and time.monotonic() > began_s + alone_s:
                    beside = site.calls()
                if stop_at_finding and (site.wrong() or site.affected(before, beside or ())):
                    break
                time.sleep(0.1)
            beside = site.calls() if beside is None else beside
            weather.end()
            ended_s = time.monotonic()
            for client in site.clients:
                client.stop()
            say("the storm is over")
            findings = _settle(site, settle_s, quiet_s, say)
            return Outcome(
                seed=seed,
                settled_s=round(time.monotonic() - ended_s, 1),
                faults=dict(weather.happened),
                **site.counts(),
                calls=dict(Counter(call.verb for call in beside)),
                tally=dict(site.auditor.tally),
                findings=[*findings, *site.affected(before, beside)],
            )
        finally:
            site.stop()
            if logs is not None:
                site.keep_logs(logs)


def _settle(
    site: Site, within_s: float, quiet_s: float, say: Callable[[str], None]
) -> list[Finding]:
    """Wait until nothing was wrong for ``quiet_s``: the watches can be at different moments.

    Return what is still wrong if nothing improved for ``within_s``, or after three times that.
    """
    began_s = better_s = wrong_s = time.monotonic()
    said_s, fewest = float("-inf"), sys.maxsize
    while True:
        site.keep_up()
        site.look_everywhere()
        findings, now_s = site.wrong(in_the_end=True), time.monotonic()
        if findings:
            wrong_s = now_s
        if len(findings) < fewest:
            fewest, better_s = len(findings), now_s
        if now_s > said_s + 10.0:
            say(f"findings now: {dict(Counter(finding.rule for finding in findings))}")
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
        "--alone", type=float, help="minutes with faults of consoles and webhooks only; a third"
    )
    parser.add_argument("--nodes", type=int, default=Scale().nodes)
    parser.add_argument("--rate", type=float, default=Scale().rate, help="pods created per second")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the product this way")
    given = parser.parse_args()
    built("etcd", "kube-apiserver", *SCHEDULERS)
    # Agents log only errors.
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
