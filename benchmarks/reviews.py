"""Measures the delay of honest pods and probes while others flood the API server and the webhook.

    python -m benchmarks.reviews [--clients 40] [--seconds 20] [--rounds 2] [--containers 12000]
                                 [--limited]

A real API server calls a real webhook. There are two floods. In the first, one tenant creates pods
of 12,000 GPU containers by dry runs. In the second, clients without credentials call the webhook's
port themselves, with a new connection for each review. Meanwhile honest users create pods in
another namespace, one after the other, and a probe asks the webhook as a kubelet does.

The tenant floods the same API server in turns without Headroom and with it. The ratio of the two
delays is what Headroom adds, because the API server, its clients and the webhook share the machine.
The goals are a p99 of 1 s beside direct calls, and beside dry runs at most 1.1 times the p99
without Headroom. With ``--limited``, a FlowSchema of the API server gives the tenant few seats.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import ssl
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import httpx

from benchmarks.vitals import vitals
from tests.admission.reviews import container, manifest, review
from tests.admission.server import WebhookServer
from tests.admission.site import TEAM, Site, installed
from tests.controlplane import STRANGER_TOKEN, ControlPlane, control_plane
from tests.waiting import until

HONEST = "honest-users"
CREATE = "/api/v1/namespaces/%s/pods?dryRun=All"
#: Seconds after which an API server gives up a review, and a kubelet gives up a probe.
GIVEN_UP_S = 5.0
#: Seconds of the API server's CPU time that are measured for each kind of request.
MEASURED_S = 2.0
#: A loopback address other than the API server's.
FLOODS_FROM = "127.0.0.2"


def large(containers: int) -> dict[str, object]:
    return manifest("8Gi", *(container(f"c{index}") for index in range(containers)))


def flood(
    port: int,
    path: str,
    body: object,
    clients: int,
    ends: Event,
    answered: "Synchronized[int]",
) -> None:
    """Send the body to a port of the loopback address. Each client opens a new connection for each
    request."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {STRANGER_TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )

    async def client() -> None:
        while not ends.is_set():
            try:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=context, local_addr=(FLOODS_FROM, 0)
                )
                writer.write(head.encode() + text)
                is_answered = bool(await reader.read(100))
                answered.value += is_answered
                writer.transport.abort()
            except OSError:
                await asyncio.sleep(0.1)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Delay:
    """The durations of calls."""

    calls: int
    p50_s: float
    p99_s: float
    failed: int

    def __str__(self) -> str:
        p50, p99 = (f"{each * 1e3:5.0f} ms" for each in (self.p50_s, self.p99_s))
        return f"{self.calls:4} calls, p50 {p50}, p99 {p99}, failed {self.failed}"


def measured(call: Callable[[], bool], seconds: float) -> Delay:
    """Call a function repeatedly, and return how long the calls took."""
    took_s, failed, end_s = [], 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        failed += not call()
        took_s.append(time.monotonic() - began_s)
        time.sleep(0.02)
    took_s.sort()
    p99_s = took_s[int(len(took_s) * 0.99) - (len(took_s) >= 100)]
    return Delay(len(took_s), statistics.median(took_s), p99_s, failed)


def tenants(plane: ControlPlane) -> None:
    """Let a user create pods in the team's namespace, and nothing else. Create a second
    namespace."""
    for name in (TEAM, HONEST):
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{TEAM}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    plane.call("POST", f"{rbac}/roles", {"metadata": {"name": "tenant"}, "rules": [rule]})
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "tenant"},
        "subjects": [{"kind": "User", "apiGroup": group, "name": "stranger"}],
    }
    plane.call("POST", f"{rbac}/rolebindings", binding)


def limit_tenant(plane: ControlPlane) -> None:
    """Limit the tenant's requests as docs/design/api-load.md describes."""
    flow = "/apis/flowcontrol.apiserver.k8s.io/v1"
    queuing = {"queues": 16, "handSize": 4, "queueLengthLimit": 50}
    limited = {
        "nominalConcurrencyShares": 1,
        "borrowingLimitPercent": 0,
        "limitResponse": {"type": "Queue", "queuing": queuing},
    }
    level = {"metadata": {"name": "tenants"}, "spec": {"type": "Limited", "limited": limited}}
    plane.call("POST", f"{flow}/prioritylevelconfigurations", level)
    resource = {"verbs": ["create"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"]}
    rule = {
        "subjects": [{"kind": "User", "user": {"name": "stranger"}}],
        "resourceRules": [resource],
    }
    spec = {
        "matchingPrecedence": 8000,
        "priorityLevelConfiguration": {"name": "tenants"},
        "distinguisherMethod": {"type": "ByNamespace"},
        "rules": [rule],
    }
    plane.call("POST", f"{flow}/flowschemas", {"metadata": {"name": "tenants"}, "spec": spec})


def delays(site: Site, seconds: float) -> dict[str, Delay]:
    """Create honest pods and probe the webhook, all at once; return the delays by name."""

    def create(gpus: int) -> bool:
        obj = manifest("1Gi" if gpus else None, container(gpus=gpus))
        return site.send("POST", CREATE % HONEST, obj).status == 201

    def probe() -> bool:
        assert site.webhook is not None
        try:
            with site.webhook.prober() as http:
                return http.get("/healthz", timeout=GIVEN_UP_S).status_code == 200
        except httpx.HTTPError:
            return False

    found: dict[str, Delay] = {}
    calls = {"GPU pods": lambda: create(1), "other pods": lambda: create(0)}
    if site.webhook is not None:
        calls["probes"] = probe
    threads = [
        threading.Thread(target=lambda n=n, c=c: found.update({n: measured(c, seconds)}))
        for n, c in calls.items()
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


@contextlib.contextmanager
def flooded(site: Site, port: int, path: str, body: object, clients: int) -> Iterator[None]:
    """Flood a port while the context lasts."""
    ends, answered = multiprocessing.Event(), multiprocessing.Value("i", 0)
    arguments = (port, path, body, clients, ends, answered)
    flooding = multiprocessing.Process(target=flood, args=arguments, daemon=True)
    flooding.start()
    until(lambda: answered.value >= clients, "the flood is answered")
    count = answered.value
    yield
    show(f"  {answered.value - count} requests of the flood were answered")
    ends.set()
    flooding.join(10.0)
    flooding.kill()


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def costs(site: Site, large_one: object) -> None:
    """Print the CPU time of one request of the flood, of an ordinary pod, and of a pod that is as
    large as a GPU pod may be. Other load on the machine changes CPU time much less than a delay."""
    pods = {"1 container": large(1), "64 containers": large(64), "the flood's": large_one}
    processes = {"API server": site.plane.pid("kube-apiserver")}
    if site.webhook is not None:
        processes["webhook"] = site.plane.pid(site.webhook.name)
    for what, body in pods.items():
        count, before_s = 0, {name: vitals(pid).cpu_s for name, pid in processes.items()}
        spent_s = dict.fromkeys(processes, 0.0)
        while spent_s["API server"] < MEASURED_S:
            status = site.send("POST", CREATE % TEAM, body).status
            count += 1
            spent_s = {name: vitals(pid).cpu_s - before_s[name] for name, pid in processes.items()}
        each = ", ".join(f"{name} {cpu_s / count * 1e3:.1f} ms" for name, cpu_s in spent_s.items())
        show(f"  one request, {what}: {status}, CPU {each}")


def report(what: str, found: Mapping[str, Delay]) -> None:
    for name, delay in sorted(found.items()):
        show(f"{what:42} {name:10} {delay}")


def serve(site: Site) -> WebhookServer:
    """Start the webhook, and wait until the API server calls it."""
    site.serve_webhook()
    obj = manifest("1Gi")
    until(
        lambda: site.send("POST", CREATE % HONEST, obj).body["spec"]["schedulerName"] == "headroom",
        "the webhook is called",
    )
    assert site.webhook is not None
    return site.webhook


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="turns without and with Headroom")
    parser.add_argument(
        "--containers", type=int, default=12_000, help="containers in a pod of the flood"
    )
    parser.add_argument("--limited", action="store_true", help="few seats for the tenant (APF)")
    options = parser.parse_args()
    body, seconds = large(options.containers), options.seconds
    worst: dict[tuple[str, bool], list[float]] = {}

    def dry_runs(site: Site, what: str) -> None:
        target = (site.plane.port, CREATE % TEAM, body, options.clients)
        with flooded(site, *target):
            found = delays(site, seconds)
        report(f"{options.clients} clients, dry runs, {what}", found)
        for name, delay in found.items():
            worst.setdefault((name, site.webhook is not None), []).append(delay.p99_s)

    with control_plane() as plane:
        tenants(plane)
        if options.limited:
            limit_tenant(plane)
        for _ in range(options.rounds):
            show("without Headroom:")
            costs(Site(plane), body)
            dry_runs(Site(plane), "without Headroom")
            show("with Headroom:")
            with installed(plane) as site:
                server = serve(site)
                costs(site, body)
                report("quiet", delays(site, seconds))
                dry_runs(site, "with Headroom")
                with flooded(site, server.port, "/mutate", review(body), options.clients):
                    found = delays(site, seconds)
                report(f"{options.clients} clients, direct calls", found)
    for name in ("other pods", "GPU pods"):
        without_s, with_s = (statistics.mean(worst[name, each]) for each in (False, True))
        show(
            f"p99 of {name} beside dry runs: {without_s:.2f} s without Headroom, "
            f"{with_s:.2f} s with it, ratio {with_s / without_s:.2f}"
        )


if __name__ == "__main__":
    main()
