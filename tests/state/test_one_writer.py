"""Only ``ClusterWriter`` changes the state of the cluster. Other code calls only methods that
read."""

import ast
import re
from pathlib import Path

from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from tests.controlplane import ROOT

#: The parts of a ``Cluster`` that its readers can reach, and their methods that read.
READS = {
    "activities": {"age_s", "node_of"},
    "back_offs": {"holds", "holds_in", "marks", "over"},
    "budgets": {"known", "over"},
    "sm_decreases": {"of", "since"},
    "departures": {"ended_by_kubelet", "marked", "precede", "seen"},
    "dra": set[str](),
    "edits": {"now", "of"},
    # In a dump, ``namespaces`` is a dictionary.
    "namespaces": {
        *("annotation", "are_exempt", "default_vram", "default_vrams", "items", "known"),
    },
    "gpu_users": set[str](),
    "neighbours": {"known", "match"},
    "observations": {"is_pending", "of_pod"},
    "overcommits": {"now"},
    "overuses": {"nodes", "rejected_lately"},
    "headroom_gains": {"of", "since"},
    "holds": {
        *("against", "all", "all_binding", "binding_to", "may_follow", "members", "node_of"),
        *("nominees", "nominees_before"),
    },
    "least_priority": {"get"},
    "starting": {"nodes"},
    "unfinished_binds": {"nodes_of"},
    "usual": set[str](),
}
#: These modules build their own state, or are the writer.
WRITERS = {
    *("headroom/core/cluster/cluster_writer.py", "headroom/core/journal/dump.py"),
    "headroom/doctor/node_rules.py",
}
#: Calls of kube-scheduler may add demand and holds.
BY_CALLS = {
    "extender/scheduler/filter.py": {
        *("holds.ask", "holds.assume", "holds.reject", "usual.prepare", "usual.see"),
    },
    "extender/groups/binds.py": {"holds.call_bind", "holds.end_group"},
    "extender/scheduler/preempt.py": {"holds.nominate"},
    "extender/scheduler/prioritize.py": {"holds.assume"},
}


def test_every_part_of_the_state_is_listed() -> None:
    state = Cluster(Rules(), 1.0, 0.0)
    assert {name for name in vars(state) if not name.startswith("_")} == set(READS)


def test_no_reader_calls_a_method_that_writes() -> None:
    found: dict[str, set[str]] = {}
    named = re.compile(rf"\.\s*(?:{'|'.join(READS)})\b")
    files = [
        path for package in ("extender", "headroom") for path in Path(ROOT, package).rglob("*.py")
    ]
    for path in sorted(files):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if not named.search(text):
            continue  # Parsing is slow.
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            part = node.func.value
            if not isinstance(part, ast.Attribute) or part.attr not in READS:
                continue
            if name not in WRITERS and node.func.attr not in READS[part.attr]:
                found.setdefault(name, set()).add(f"{part.attr}.{node.func.attr}")
    assert found == BY_CALLS


def test_a_reader_has_no_method_of_the_writer() -> None:
    writes = set(vars(ClusterWriter)) - set(vars(Cluster))
    assert {"apply", "steps", "weigh_next", "follow"} <= writes
