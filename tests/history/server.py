"""Runs a real Prometheus on loopback that scrapes exporters and can have samples from before its
start.
"""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests import debian
from tests.agent.exporter import StandIn
from tests.processes import Processes, free_ports
from tests.waiting import PATIENCE_S, until

#: Labels that Prometheus adds to each target. They are the labels that the GPU Operator's
#: ServiceMonitor adds.
TARGET = {"namespace": "gpu-operator", "pod": "dcgm-exporter", "container": "exporter"}
_SCRAPED_EVERY_S = 1
_JOB = "dcgm"


class Prometheus:
    """A Prometheus that keeps its data on disk, so that the data survives ``kill`` and ``run``."""

    def __init__(self, processes: Processes, port: int) -> None:
        self.port = port
        self._processes = processes
        self._folder = processes.folder
        self._program, self._tool = debian.prometheus()

    def configure(self, exporters: Sequence[StandIn]) -> None:
        labels = ", ".join(f"{name}: {value}" for name, value in TARGET.items())
        targets = ", ".join(address(exporter) for exporter in exporters)
        (self._folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {_SCRAPED_EVERY_S}s, scrape_timeout: 1s}}\n"
            f"scrape_configs:\n- job_name: {_JOB}\n  static_configs:\n"
            f"  - {{targets: [{targets}], labels: {{{labels}}}}}\n"
        )

    def scrape(self, jobs: Sequence[Mapping[str, Any]], rules: Path | None = None) -> None:
        """Write a configuration that scrapes these jobs and evaluates the rules every second.
        ``jobs`` have the format of Prometheus' configuration.
        """
        often = {f"{what}_interval": f"{_SCRAPED_EVERY_S}s" for what in ("scrape", "evaluation")}
        config = {
            "global": {**often, "scrape_timeout": "1s"},
            "rule_files": [] if rules is None else [str(rules)],
            "scrape_configs": list(jobs),
        }
        (self._folder / "prometheus.yml").write_text(json.dumps(config))

    def ask(self, path: str, **parameters: str) -> Any:
        """Send a request to the API of Prometheus. Return the data of the response, which must be
        successful.
        """
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/api/v1/{path}?{urlencode(parameters)}")
            answer = json.load(connection.getresponse())
        finally:
            connection.close()
        assert answer["status"] == "success", answer
        return answer["data"]

    def remember(self, lines: Sequence[str], longest_block: str = "2h") -> None:
        """Write series with past samples into the storage before Prometheus starts.

        ``longest_block`` is 2h times a power of 3. Longer blocks save time if the history is long.
        """
        file = self._folder / "past.om"
        # The samples of each series must be adjacent and in order.
        file.write_text("\n".join(lines) + "\n# EOF\n")
        command = [self._tool, "tsdb", "create-blocks-from", "openmetrics", str(file), "data"]
        command.append(f"--max-block-duration={longest_block}")
        done = subprocess.run(command, cwd=self._folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()

    def run(self) -> None:
        self._processes.spawn(
            "prometheus",
            self._program,
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        )
        until(self._is_ready, "Prometheus is ready")

    def kill(self) -> None:
        self._processes.kill("prometheus")

    def _is_ready(self) -> bool:
        self._processes.raise_if_ended()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/-/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def prometheus(port: int | None = None) -> Iterator[Prometheus]:
    """A Prometheus that is neither configured nor running yet. Raise ``Unavailable`` if it cannot
    be downloaded.
    """
    processes = Processes("headroom-prometheus-")
    try:
        yield Prometheus(processes, port or free_ports(1)[0])
    finally:
        processes.stop()


def address(exporter: StandIn) -> str:
    return exporter.url.removeprefix("http://").removesuffix("/metrics")


def past(line: str, exporter: StandIn, values: Sequence[float], every_s: float = 30) -> list[str]:
    """Return samples of an exporter's series as Prometheus stores them. ``values`` end now, and are
    ``every_s`` apart.
    """
    series, _, _ = line.rpartition(" ")
    for name in TARGET:
        series = series.replace(f",{name}=", f",exported_{name}=")
    own = {**TARGET, "instance": address(exporter), "job": _JOB}
    labels = ",".join(f'{name}="{value}"' for name, value in own.items())
    series = f"{series.removesuffix('}')},{labels}}}"
    first_s = time.time() - every_s * len(values)
    return [f"{series} {value} {first_s + every_s * i:.3f}" for i, value in enumerate(values)]


def recorded_lines(file: Path, of: str, **renamed: str) -> list[str]:
    """Return the lines of one metric in a recorded exposition, with replaced GPU names."""
    found = []
    for line in file.read_text().splitlines():
        if line.startswith(f"{of}{{"):
            for name, other in renamed.items():
                line = line.replace(f'="GPU-{name}"', f'="{other}"')
            found.append(line)
    return found


def saying(line: str, value: object, at: str = "") -> str:
    """Return the line with another value and optionally with a timestamp in milliseconds."""
    return f"{line.rpartition(' ')[0]} {value} {at}".rstrip()
