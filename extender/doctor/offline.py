"""Entry points of the doctor: each builds the state that its rules read, and runs them."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from contract.kube import Namespace, Node
from extender.config.fleet_file import Fleet
from extender.config.settings import Settings
from extender.doctor.environment import Environment, examine_environment
from extender.doctor.findings import Finding
from extender.doctor.rules import examine
from extender.doctor.scheduler_config import examine_scheduler, offered_resources
from extender.errors import BadSettings
from extender.state.changes import Event, GPUNodeSeen, Relisted
from extender.state.cluster_writer import ClusterWriter
from extender.version import own_version


def fleet_events(fleet: Fleet) -> list[Event]:
    """Return the events that add the nodes and namespaces of a fleet file; it has no pods."""
    now_s = time.monotonic()
    return [
        Relisted(Namespace, tuple(fleet.kube_namespaces()), now_s),
        Relisted(Node, tuple(fleet.kube_nodes()), now_s),
        *(GPUNodeSeen(gpunode, now_s) for gpunode in fleet.gpunodes(datetime.now(UTC))),
    ]


def diagnose(settings: Settings, events: Sequence[Event]) -> list[Finding]:
    """Examine the cluster that ``events`` describe."""
    state = ClusterWriter(settings.rules, settings.stale_after_s, time.time() - time.monotonic())
    state.apply(events)
    return examine(state, time.monotonic(), own_version())


def diagnose_environment(settings: Settings, environment: Environment) -> list[Finding]:
    """Examine the other components that run in the cluster."""
    rules, best_only = settings.rules, settings.filter_best_only
    deadline_s = settings.bind_deadline_s
    return examine_environment(environment, rules.manages, own_version(), best_only, deadline_s)


def diagnose_scheduler(settings: Settings, path: Path, nodes: Sequence[Node] = ()) -> list[Finding]:
    """Examine a KubeSchedulerConfiguration file, and compare it with what ``nodes`` offer.

    Raises ``BadSettings`` if the file cannot be read or is of another kind.
    """
    manages = settings.rules.manages
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        offered = offered_resources(nodes, manages)
        best_only, deadline_s = settings.filter_best_only, settings.bind_deadline_s
        return examine_scheduler(config, manages, best_only, offered, deadline_s)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as err:
        raise BadSettings(f"{path}: cannot be read: {err}") from err
    except BadSettings as err:
        raise BadSettings(f"{path}: {err}") from err
