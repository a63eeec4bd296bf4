"""Takes the agent's samples in a separate process, because a process finds the driver library only
when it starts. Each line on stdin is a command:

    step            the status that the next sample makes, as JSON
        steps <n>       n samples, without output
    maintain <why>  close the driver for this maintenance; without <why>, open it again
    opened          whether the device of the driver is open
    vitals          {"fds", "threads", "samples" (GPM's, not given back), "kib" (resident)}
"""

import contextlib
import ctypes
import json
import os
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from agent.logs import log_to_stderr
from agent.probes.cause import Cause
from agent.sampler import device_probe_of
from agent.settings import read_settings
from agent.status_builder import summarise

#: Shorter than in an agent, for tests that wait until it expires.
EXPORTER_TIMEOUT_S = 0.5


def descriptors() -> Iterator[os.stat_result]:
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.stat(f"/proc/self/fd/{each}")


def main() -> None:
    log_to_stderr()
    settings = read_settings(sys.argv[1:], os.environ)
    sysfs = Path(os.environ.get("FAKE_SYSFS", "/sys"))
    survey = device_probe_of(settings, EXPORTER_TIMEOUT_S, sysfs)
    status = None
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        match command:
            case "step" | "steps":
                for _ in range(int(argument or 1)):
                    readings = list(survey.read())
                    readings += survey.follow(readings)
                    status = summarise(readings, datetime.now(UTC), before=status)
                answer = msgspec.to_builtins(status) if command == "step" else {}
            case "maintain":
                survey.maintenance = Cause(argument, "maintenance") if argument else None
                answer = {}
            case "opened":
                device = os.stat(os.environ["FAKE_NVML_DEVICE"])
                answer = {"opened": any(os.path.samestat(device, each) for each in descriptors())}
            case "vitals":
                answer = {
                    "fds": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "samples": ctypes.CDLL("libnvidia-ml.so.1").fakeSamples(),
                    "kib": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
                }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    survey.close()


if __name__ == "__main__":
    main()
