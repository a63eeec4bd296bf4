"""Runs a storm of random faults on a real API server. An auditor checks the result.

    make chaos ARGS="--seed 1 --minutes 10"

Prints each fault when it begins. The same seed produces the same faults. The exit status is 1 if
the auditor has findings.
"""

import argparse
import logging
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import structlog

from tests.chaos.altered import MUTANTS
from tests.chaos.audit import Finding
from tests.chaos.calls import noticed, unexpected
from tests.chaos.faults import Injector, report, schedule
from tests.chaos.site import SCHEDULERS, WIRED, Plan, Site
from tests.controlplane import built, control_plane
from tests.forks import without_main
from tests.standin.fleet import NODES

Counts = dict[str, Counter[str]]


def storm(plan: Plan, logs: Path | None = None) -> tuple[list[Finding], Counts]:
    """Run one storm in an empty cluster. Return the findings and the counts of faults, calls and
    pods.
    """
    with control_plane() as plane:
        site = Site(plane, plan)
        try:
            site.start()
            injector = Injector(site, schedule(plan, [*site.nodes]), plan.settle_s)
            before = site.verbs.taken_calls()
            findings = [*injector.run_alone(plan.alone_s)]
            during = site.verbs.taken_calls()
            if not findings:
                injector.run_until(plan.lasts_s)
            injector.end()
            for client in site.clients:
                client.stop()
            report("the storm is over")
            findings += _settle(site, plan)
            findings += noticed(before, during, site.auditor.states)
            for name in WIRED:
                findings += unexpected(name, plane.log(name))
            return findings, {
                "faults": injector.counts,
                "requests": sum((wire.done for wire in site.wires.values()), Counter()),
                # Count the calls from the time when only consoles and webhooks had faults.
                "calls": Counter(call.verb for call in during),
                "pods": site.auditor.tally,
            }
        finally:
            site.stop()
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for log in plane.folder.glob("*.log"):
                    shutil.copy(log, logs)


def _settle(site: Site, plan: Plan) -> list[Finding]:
    """Wait until the cluster is consistent. Return the findings that remain if nothing improves for
    ``settle_s``, or after three times ``settle_s``.

    The time starts when the API server answers. The cluster is consistent if there is no finding
    for ``quiet_s``, because watches can be at different versions.
    """
    site.until(lambda: site.plane.call("GET", NODES), "the API server answers")
    began_s = better_s = wrong_s = time.monotonic()
    fewest = sys.maxsize
    while True:
        site.supervise()
        findings, now_s = site.wrong(in_the_end=True), time.monotonic()
        if findings:
            wrong_s = now_s
        if len(findings) < fewest:
            fewest, better_s = len(findings), now_s
            report(f"findings now: {dict(Counter(finding.rule for finding in findings))}")
        over = now_s > min(better_s + plan.settle_s, began_s + 3 * plan.settle_s)
        if now_s > wrong_s + plan.quiet_s or over or site.wrong():
            return findings
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--alone", type=float, help="minutes with faults of consoles and webhooks only; a third"
    )
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults")
    parser.add_argument("--logs", type=Path, help="copy the logs of all processes to this folder")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the product this way")
    given = parser.parse_args()
    built("etcd", "kube-apiserver", *SCHEDULERS)
    without_main()
    # The agents run in this process, so log only their errors.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    plan = Plan(
        given.seed,
        lasts_s=60.0 * given.minutes,
        alone_s=60.0 * (given.minutes / 3 if given.alone is None else given.alone),
        every_s=given.every,
        nodes=given.nodes,
        mutant=given.mutant,
    )
    findings, counts = storm(plan, given.logs)
    for name, count in counts.items():
        report(f"{name}: {dict(count)}")
    report("\n".join(map(str, findings)) or "verdict: sound")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
