"""Measures memory and CPU of the agent's process, and whether memory or file descriptors grow.

    python -m benchmarks.agent [--seconds 60] [--cycles 10000] [--python PATH]
    python -m benchmarks.agent --full [--seconds 60] [--samples 17280] [--python PATH]

With ``--full``, it measures the fullest node instead (``benchmarks.agent_full``).

The agent authenticates as in a pod: with the token and the certificate authority of a service
account, not with a kubeconfig. ``--python`` names its interpreter, for example one that has only
the packages of the agent's image (``pip install -r requirements/agent.txt``). The tests'
interpreter has more packages, and some of the agent's dependencies import them if they are
installed.

The node has 8 GPUs, and 100 pods with 10 processes each. The driver is the fake library. The
kubelet's checkpoint, its PodResources API and /proc are simulated. The API server is a script that
accepts each report and heartbeat. A simulated dcgm-exporter repeats each of its 24 counters for
every pod that shares a device: half a megabyte, with new content every 30 s. The simulations run in
this process, so only the agent is measured.

First, an agent samples every 5 s, as in production. Its metrics are scraped every 15 s, then five
times a second, as Prometheus does: over TLS, with a token, on one connection. Then a client without
a token opens a connection five times a second, as any pod could do. Then another agent samples
without a pause, with new dcgm-exporter output every half second, and memory and descriptors are
read in between. The goals are less than 80 MiB resident and less than 1 % of one core, even with
frequent requests. After all cycles, there must be no more descriptors, and at most 1 MiB more
memory, than after the first tenth of the cycles.
"""

import argparse
import contextlib
import http.client
import itertools
import os
import platform
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vitals import Vitals, at_rest, vitals
from tests.agent.exporter import StandIn as Exporter
from tests.agent.scripted import ApiServer
from tests.agent.whole import Whole
from tests.certificates import Authority
from tests.driver import GIB, Gpu

ROOT = Path(__file__).parents[1]
GPUS, PODS, PROCESSES_OF_A_POD = 8, 100, 10
REPLICAS = -(-PODS // GPUS)
SCRAPES_APART_S, FREQUENT_SCRAPES_APART_S = 15.0, 0.2
MOST_RESIDENT_MIB, MOST_CORE_RATIO = 80.0, 0.01
MOST_GROWN_MIB = 1.0


class Scraper:
    """Scrapes metrics as Prometheus does: over TLS, with a token, on one connection."""

    def __init__(self, port: int, ca: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca)
        self._port, self._context = port, context
        self._connection = self._new()

    def _new(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=10, context=self._context
        )

    def text(self) -> str:
        self._connection.request("GET", "/metrics", headers={"Authorization": "Bearer t0ken"})
        answer = self._connection.getresponse()
        body = answer.read().decode()
        assert answer.status == 200, body
        return body

    def as_a_stranger(self) -> None:
        """Send a request without a token on a new connection, which the agent rejects or closes."""
        with (
            contextlib.closing(self._new()) as connection,
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", "/metrics")
            connection.getresponse().read()


def scraped(scraper: Scraper, name: str) -> float:
    text = scraper.text()
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


def exposition(collection: int) -> str:
    """Return the output of dcgm-exporter with KUBERNETES_VIRTUAL_GPUS. It differs for each
    ``collection``."""
    names = ["DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"]
    names += [f"DCGM_FI_DEV_COUNTER_{number}" for number in range(21)]
    lines = []
    for name in names:
        lines += [f"# HELP {name} What it counts.", f"# TYPE {name} gauge"]
        for gpu, pod in itertools.product(range(GPUS), range(REPLICAS)):
            labels = (
                f'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:0{gpu}:00.0",'
                f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="node-1",'
                f'DCGM_FI_DRIVER_VERSION="580.95.05",container="main",namespace="default",'
                f'pod="pod-{gpu * REPLICAS + pod}",vgpu="{pod}"'
            )
            lines.append(f"{name}{{{labels}}} 0.{collection}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run an API server as a pod reaches it. ``folder/account`` has the files that the kubelet
    mounts."""
    account = folder / "account"
    account.mkdir()
    authority = Authority(account, "ca")
    (account / "token").write_text("t0ken")
    with ApiServer.serving(authority.sign("api-server")) as api:
        api.create("uid-1")
        user = {"authenticated": True, "user": {"username": "prometheus"}}
        api.created = {
            "/apis/authentication.k8s.io/v1/tokenreviews": {"status": user},
            "/apis/authorization.k8s.io/v1/subjectaccessreviews": {"status": {"allowed": True}},
        }
        authority.sign("agent")
        yield api


@contextlib.contextmanager
def agent(
    python: str, whole: Whole, api: ApiServer, clock: str, *flags: str
) -> Iterator[tuple[int, Scraper]]:
    """Run an agent. Yield its process id, and a scraper of its metrics."""
    host, _, port = api.url.removeprefix("https://").partition(":")
    in_a_pod = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    account = whole.folder / "account"
    arguments = [clock, str(account), "--listen", "127.0.0.1:0", *flags]
    arguments += ["--metrics-listen", "127.0.0.1:0"]
    arguments += ["--tls-cert", str(account / "agent.crt"), "--tls-key", str(account / "agent.key")]
    with subprocess.Popen(
        [python, "-m", "benchmarks.agent_hurried", *arguments, *whole.flags],
        env={name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        | whole.environment
        | in_a_pod
        | {"PYTHONPATH": str(ROOT), "NODE_NAME": "n1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            message = process.stderr.readline()
            found = re.search(r'"metrics_port": (\d+)', message)
            assert found is not None, message + process.stderr.read()
            # If nothing read its logs, the pipe would fill up and the agent would wait.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process.pid, Scraper(int(found[1]), account / "ca.crt")
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Steady:
    """An agent in normal operation."""

    vitals: Vitals
    core_ratio: float
    #: Core ratio with scrapes every ``FREQUENT_SCRAPES_APART_S``.
    scraped_core_ratio: float
    #: Core ratio while a client without a token connects as often.
    strange_core_ratio: float
    #: Number of requests to the API server during the first measurement.
    requests: int


def steady(python: str, whole: Whole, api: ApiServer, exporter: Exporter, seconds: float) -> Steady:
    with agent(python, whole, api, "real", "--dcgm-url", exporter.url) as (pid, scraper):
        end_s = time.monotonic() + 60
        while scraped(scraper, "headroom_agent_writes_total") < 2 and time.monotonic() < end_s:
            time.sleep(0.2)
        time.sleep(6)  # by then imports are done, and a second sample was compared with the first

        def core_ratio(scrapes_apart_s: float, ask: Callable[[], object]) -> float:
            before = vitals(pid)
            until_s = before.at_s + seconds
            while (left_s := until_s - time.monotonic()) > 0:
                time.sleep(min(scrapes_apart_s, left_s))
                ask()
                exporter.text = exposition(int(time.monotonic() / 30))
            after = vitals(pid)
            return (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s)

        written = len(api.requests)
        usual = core_ratio(SCRAPES_APART_S, scraper.text)
        requests = len(api.requests) - written
        often = core_ratio(FREQUENT_SCRAPES_APART_S, scraper.text)
        strange = core_ratio(FREQUENT_SCRAPES_APART_S, scraper.as_a_stranger)
        return Steady(vitals(pid), usual, often, strange, requests)


def many(
    python: str, whole: Whole, api: ApiServer, exporter: Exporter, cycles: int
) -> tuple[Vitals, Vitals, float]:
    """Return the vitals after a tenth of the cycles and after all cycles, and the seconds that one
    cycle took."""
    flags = ("--dcgm-url", exporter.url, "--dcgm-interval", "0.5")
    with agent(python, whole, api, "hurried", *flags) as (pid, scraper):

        def after(count: int) -> Vitals:
            while scraped(scraper, "headroom_hurried_cycles") < count:
                # Memory changes all the time, as on a busy node.
                whole.driver.use(999, {"GPU-0": (count % 7 + 1) * GIB})
                exporter.text = exposition(int(time.monotonic() * 10))
                time.sleep(0.5)
            return at_rest(pid)

        first = after(cycles // 10)
        last = after(cycles)
        return first, last, (last.at_s - first.at_s) / (cycles - cycles // 10)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the agent's memory and CPU.")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the production-like run"
    )
    parser.add_argument(
        "--cycles", type=int, default=10_000, help="samples without a pause; 0: skip that run"
    )
    parser.add_argument("--full", action="store_true", help="measure the fullest node instead")
    parser.add_argument(
        "--samples", type=int, default=17_280, help="samples of the simulated day, with --full"
    )
    parser.add_argument("--python", default=sys.executable, help="the agent's interpreter")
    args = parser.parse_args()
    if args.full:
        from benchmarks import agent_full

        return agent_full.main(args.python, args.seconds, args.samples)
    with tempfile.TemporaryDirectory(prefix="headroom-agent-") as folder:
        gpus = [Gpu(f"GPU-{index}") for index in range(GPUS)]
        whole = Whole(Path(folder), gpus, REPLICAS)
        try:
            fill(whole)
            with api_server(Path(folder)) as api, Exporter().serving() as exporter:
                exporter.text = exposition(0)
                return measure(args.python, whole, api, exporter, args.seconds, args.cycles)
        finally:
            whole.stop()


def fill(whole: Whole) -> None:
    """Start the pods, with all their processes on the devices that they got."""
    pids = itertools.count(500_000)
    with whole.driver.batch():
        for number in range(PODS):
            uid = f"{number:08x}-1111-4222-8333-{number:012x}"
            device = whole.run(uid, f"pod-{number}", GIB)
            cgroup = f"/{whole.cgroup(uid).relative_to(whole.cgroups)}"
            for pid in itertools.islice(pids, PROCESSES_OF_A_POD - 1):
                whole.process(pid, "python", cgroup)
                whole.driver.use(pid, {device: GIB // 2})


def measure(
    python: str, whole: Whole, api: ApiServer, exporter: Exporter, seconds: float, cycles: int
) -> int:
    found = steady(python, whole, api, exporter, seconds)
    after = found.vitals
    goals = [
        ("resident", f"{after.resident_mib:.1f} MiB", "< 80 MiB",
         after.resident_mib < MOST_RESIDENT_MIB),
        ("peak resident", f"{after.peak_mib:.1f} MiB", "< 80 MiB",
         after.peak_mib < MOST_RESIDENT_MIB),
        ("of one core", f"{found.core_ratio:.2%}", "< 1 %", found.core_ratio < MOST_CORE_RATIO),
        ("with frequent scrapes", f"{found.scraped_core_ratio:.2%}", "< 1 %",
         found.scraped_core_ratio < MOST_CORE_RATIO),
        ("without a token", f"{found.strange_core_ratio:.2%}", "< 1 %",
         found.strange_core_ratio < MOST_CORE_RATIO),
    ]  # fmt: skip
    notes = [
        f"{found.requests} requests to the API server in {seconds:.0f} s; {after.threads} threads"
    ]
    if cycles:
        first, last, cycle_s = many(python, whole, api, exporter, cycles)
        grown_mib = last.resident_mib - first.resident_mib
        goals += [
            (f"grown over {cycles} cycles", f"{grown_mib:+.1f} MiB", "< 1 MiB",
             grown_mib < MOST_GROWN_MIB),
            ("descriptors", f"{first.fds} -> {last.fds}", "no more", last.fds <= first.fds),
            ("threads", f"{first.threads} -> {last.threads}", "no more",
             last.threads <= first.threads),
        ]  # fmt: skip
        notes.append(f"a hurried cycle took {cycle_s * 1000:.1f} ms, scrapes and writes included")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"{GPUS} GPUs, {PODS} pods, {PODS * PROCESSES_OF_A_POD} processes; {machine}")  # noqa: T201
    for what, figure, goal, met in goals:
        print(f"{what:<26}{figure:>14}  {goal:<9} {'met' if met else 'NOT MET'}")  # noqa: T201
    for note in notes:
        print(note)  # noqa: T201
    return 0 if all(met for *_, met in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
