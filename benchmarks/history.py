"""Measures memory and CPU of the console's history: 5,000 nodes of 8 GPUs, 100,000 pods, an hour.

``python -m benchmarks.history [quiet|usual|noisy]`` records an hour of reports as fast as it can,
and prints one line of JSON. In case *quiet*, one node in ten reports at each step. In case *usual*,
agents follow their own rules: every node reports each minute that SM activity changed, and the use
of one pod in five changes. Case *noisy* is the worst case, in which every value changes at every
step. Then another process takes over the history, as a console does that starts beside another
console."""

import json
import random
import resource
import sys
import time
from pathlib import Path

from headroom.console.history.history import KEPT_S, RESOLUTION_S, History, Layout, PodOn

NODES, GPUS, PODS = 5_000, 8, 20
#: Ratio of nodes that report at a step, ratio of their values that change, and largest change.
CASES = {
    "quiet": (0.1, 0.02, 50),
    "usual": (1 / 6, 0.2, 100),
    "noisy": (1.0, 1.0, 30),
}
MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main(case: str) -> None:
    reporting, changing, largest = CASES[case]
    draw = random.Random(1)
    layouts = [
        Layout(
            tuple(f"GPU-{node:05d}-{slot}" for slot in range(GPUS)),
            tuple(
                PodOn(pod % GPUS, f"{node:05d}-{pod:02d}", "team", f"pod-{node}-{pod}", 8 << 30)
                for pod in range(PODS)
            ),
        )
        for node in range(NODES)
    ]
    values = [[draw.randrange(10_000) for _ in range(each.width)] for each in layouts]
    history, began_bytes, took_s, rows = History(), resident_bytes(), 0.0, 0
    for step in range(1, KEPT_S // RESOLUTION_S + 1):
        changed = [node for node in range(NODES) if draw.random() < reporting]
        for node in changed:
            of_node = values[node]
            for column in range(len(of_node)):
                if changing == 1.0 or draw.random() < changing:
                    of_node[column] = max(0, of_node[column] + draw.randint(-largest, largest))
        at_s = time.process_time()
        for node in changed:
            history.add(f"node-{node:05d}", step, layouts[node], values[node])
        if step % 3 == 0:
            history.forget(step)
        took_s += time.process_time() - at_s
        rows += len(changed)
    at_s = time.perf_counter()
    parts = history.since("node-00042", history.first_step)
    read_s = time.perf_counter() - at_s
    found = {
        "case": case,
        "devices": NODES * GPUS,
        "pods": NODES * PODS,
        "rows": rows,
        "own_mib": round(history.size_bytes / MIB, 1),
        "resident_mib": round((resident_bytes() - began_bytes) / MIB, 1),
        "kept_s": KEPT_S - history.first_step * RESOLUTION_S,
        "resolution_s": RESOLUTION_S,
        "cpu_ratio_of_a_core": round(took_s / KEPT_S, 4),
        "us_per_row": round(1e6 * took_s / rows, 1),
        "read_of_a_node_ms": round(1e3 * read_s, 2),
        "rows_of_the_node": sum(len(steps) for _, steps, _ in parts),
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "usual")
