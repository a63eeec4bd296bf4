"""The checks, in the order in which they run."""

from collections.abc import Callable

from benchmarks.gpu.checks import (
    activity,
    contention,
    cost,
    driver,
    engines,
    fault,
    frameworks,
    limits,
    mps,
    processes,
)
from benchmarks.gpu.checks import fields as figures
from benchmarks.gpu.lines import Line
from benchmarks.gpu.machine import Machine

CHECKS: dict[str, Callable[[Machine], Line]] = {
    "fields": figures.fields,
    "minor": figures.minor,
    "init": driver.init,
    "latency": driver.latency,
    "unknown-fields": driver.unknown_fields,
    "processes": processes.listed,
    "unattributed": processes.unattributed,
    "stride": processes.stride,
    "pid-namespace": processes.pid_namespace,
    "capabilities": processes.capabilities,
    "sm-activity": activity.sm_activity,
    "illegal-address": fault.illegal_address,
    "mps": mps.two_clients,
    "mps-limit": mps.limited_clients,
    "memory-limits": limits.memory_limits,
    "engines": engines.two_engines,
    "contention": contention.contention,
    "frameworks": frameworks.within_share,
    "cost": cost.cost,
}
