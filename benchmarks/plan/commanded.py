"""Runs `headroom plan` on two weeks of clusters of all families, and checks what it prints.

The ranges of week 1 are compared with the replays of week 2, and annotations with the peaks in the
CSV file of week 1. Nodes have 4 GPUs.
"""

import html
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plan import families, generated
from benchmarks.recommend.life import Life, Workload
from benchmarks.recommend.printed import Advice, bytes_of, judged
from benchmarks.recommend.printed import advised as advised_for

WEEK_S = 7 * generated.DAY_S
#: Sizes of clusters, which are also their numbers of nodes.
SIZES = (15, 30, 50)
#: Sizes of clusters of which only the advice is checked.
ADVISED_SIZES = (6, 10, 15)
_OPTIONS = (
    *("--device-choice", "steered", "--replicas", "4", "--vram", "peaks"),
    *("--seeds", "2", "--processes", "1", "--json"),
)


_ONE_REPLAY = (
    *("--device-choice", "predicted", "--replicas", "4", "--vram", "peaks"),
    *("--seeds", "1", "--processes", "1", "--json"),
)
_GPU_BYTES = generated.GPU_MIB << 20
#: A line of the report that annotates a workload, or gives a namespace a default.
_ANNOTATION = re.compile(r"\s*(\S+)\s+headroom\.gpu/(vram|default-vram): (\S+)(?:\s+# (.*))?")
#: The advice from a week without pods.
_NOTHING: Any = {"next_steps": {"annotate": [], "plugin_config": None}, "exclusive_workloads": []}


class Printed(NamedTuple):
    """One amount in the output of a plan."""

    kind: str
    owner: str
    amount: str
    remark: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The checks of what was printed about one cluster."""

    family: str
    pods: int
    #: Whether the ranges of the unshared need, of the need with replicas and of the saved ratio
    #: contain the figures of week 2; None without ranges.
    contained: tuple[bool, bool, bool] | None
    annotations: int
    #: Number of annotations below a peak of their workload, and of workloads also named exclusive.
    below: int
    both: int


def check(number: int, first_seed: int) -> Checked:
    """Plan both weeks of one cluster."""
    name, size, weeks = _cluster(number, first_seed)
    one, other = (_planned(week, size) for week in weeks)
    peaks = _peaks(weeks[0])
    amounts = {
        each["workload"]: bytes_of(each["annotation"].partition(": ")[2]) >> 20
        for each in one["next_steps"]["annotate"]
    }
    exclusive = {each["workload"] for each in one["exclusive_workloads"]}
    return Checked(
        name,
        len(weeks[0]),
        _contained(one["configurations"], other["configurations"]),
        len(amounts),
        sum(amount < peaks[workload] for workload, amount in amounts.items()),
        len(exclusive & amounts.keys()),
    )


def advised(number: int, first_seed: int) -> tuple[str, Counter[str]]:
    """Count the outcomes of all advice from the first week of one cluster.

    The advice is the text that users get: annotations, defaults of namespaces and the ConfigMap
    that ``headroom plan`` prints, and for each workload a patch and the amount of ``auto``. The
    outcomes follow from this text and the peaks in the CSV file.
    """
    name, size, (week, _) = _cluster(number, first_seed, ADVISED_SIZES)
    week = [replace(row, workload=_namespaced(row.workload)) for row in week]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        options = *_ONE_REPLAY, "--html", str(page)
        data = _planned(week, size, options) if week else _NOTHING
        text = html.unescape(re.sub(r"<[^>]*>", "", page.read_text())) if week else ""
    highest = {each: mib << 20 for each, mib in _peaks(week).items()}
    found = Counter({"below, not stated": 0})
    listed = {each["workload"]: each for each in data["next_steps"]["annotate"]}
    exclusive = {each["workload"] for each in data["exclusive_workloads"]}
    found["workloads"] += len(highest)
    found["workloads also exclusive"] += len(exclusive & listed.keys())
    found["workloads not named"] += len(highest.keys() - exclusive - listed.keys())
    printed = [Printed("JSON", each, listed[each]["annotation"].split()[1], "") for each in listed]
    for line in text.splitlines():
        if (match := _ANNOTATION.fullmatch(line)) is not None:
            owner, kind, amount, remark = match.groups()
            printed.append(Printed(kind, owner, amount, remark or ""))
            if kind == "default-vram":
                found["defaults beside an exclusive workload"] += any(
                    each.startswith(f"{owner}/") for each in exclusive
                )
    for each in printed:
        peaks = [
            peak
            for workload, peak in highest.items()
            if workload == each.owner or workload.startswith(f"{each.owner}/")
        ]
        outcome = judged(Advice(each.kind, each.amount, each.remark), max(peaks), _GPU_BYTES)
        found[f"{each.kind}: {outcome}"] += 1
        found["below, not stated"] += outcome == "below, not stated"
    config = data["next_steps"]["plugin_config"]
    if config is not None:
        found["ConfigMaps"] += 1
        found["ConfigMaps with an amount"] += bool(re.search(r"\d[KMGT]i?\b|memory", config))
    for workload, lives in _lives(week).items():
        for advice in advised_for(Workload(workload, name, _GPU_BYTES, ((0.0, 0),), lives), WEEK_S):
            outcome = judged(advice, highest[workload], _GPU_BYTES)
            found[f"{advice.source}: {outcome}"] += 1
            found["below, not stated"] += outcome == "below, not stated"
    return name, found


def _namespaced(workload: str) -> str:
    return f"team-{sum(workload.encode()) % 3}/{workload}"


def _lives(week: list[generated.Row]) -> dict[str, tuple[Life, ...]]:
    """Return the lives of each workload. Pods that run at the end of the week run on after it."""
    lives: dict[str, tuple[Life, ...]] = {}
    for row in week:
        end_s = row.ended_s + (row.ended_s >= WEEK_S)
        at_s, peak_bytes = (row.created_s + row.ended_s) / 2, row.peak_mib << 20
        use = (float(row.created_s), peak_bytes * 6 // 10), (at_s, peak_bytes)
        life = Life(float(row.created_s), float(end_s), use, "completed", "p")
        lives[row.workload] = (*lives.get(row.workload, ()), life)
    return lives


def _cluster(
    number: int, first_seed: int, sizes: Sequence[int] = SIZES
) -> tuple[str, int, list[list[generated.Row]]]:
    """Return the family of a cluster, its size, and the pods of both weeks."""
    names = list(families.TUNED | families.JUDGED)
    name, size = names[number % len(names)], sizes[number % len(sizes)]
    rows = families.rows(name, first_seed + number, 14, size)
    return name, size, [sorted(_week(rows, at), key=lambda row: row.created_s) for at in (0, 1)]


def _peaks(rows: list[generated.Row]) -> dict[str, int]:
    """Return the highest peak of each workload, in MiB."""
    peaks: dict[str, int] = {}
    for row in rows:
        peaks[row.workload] = max(peaks.get(row.workload, 0), row.peak_mib)
    return peaks


def _week(rows: list[generated.Row], number: int) -> Iterator[generated.Row]:
    for row in rows:
        begin_s = max(row.created_s, number * WEEK_S) - number * WEEK_S
        end_s = min(row.ended_s, (number + 1) * WEEK_S) - number * WEEK_S
        if begin_s < end_s:
            figures = row.name, row.workload, row.gpus, row.peak_mib, row.sm_ratio
            yield generated.Row(*figures, begin_s, end_s)


def _planned(rows: list[generated.Row], nodes: int, options: Sequence[str] = _OPTIONS) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        pods, machines = generated.write(Path(folder), rows, nodes)
        files = "--pods", str(pods), "--machines", str(machines)
        command = [sys.executable, "-m", "headroom", "plan", *files, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


def _contained(one: Any, other: Any) -> tuple[bool, bool, bool] | None:
    # A third row compares one pool, if some pods need GPUs of their own.
    one, other = one[:2], other[:2]
    ranges = [each["gpus_range"] for each in one]
    if None in ranges:
        return None
    needs = [each["replays"][0]["gpus"] for each in other]
    low, high = one[1]["saved_ratio_range"]
    unshared, shared = (
        first <= need <= last for (first, last), need in zip(ranges, needs, strict=True)
    )
    return unshared, shared, low <= round(1 - needs[1] / needs[0], 9) <= high
