"""Delay of honest pods and probes while others flood the webhook with the largest reviews.

    python -m benchmarks.reviews [--clients 40] [--seconds 8]

A real API server calls a real webhook. Two floods: clients without credentials that call the
webhook's port themselves, each with a new connection for each review, and one tenant who creates
pods of 12,000 GPU containers by dry runs. Meanwhile honest users create pods, one after the other,
and a probe asks the webhook as a kubelet does. Pods without a GPU call no webhook: they show what
the API server alone takes.
"""

import argparse
import asyncio
import json
import multiprocessing
import ssl
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event

import httpx

from tests.admission.reviews import container, manifest, review
from tests.admission.server import WebhookServer
from tests.admission.site import PODS, Site, installed
from tests.controlplane import STRANGER_TOKEN, control_plane
from tests.waiting import until

CONTAINERS = 12_000
#: Seconds after which an API server gives up a review, and a kubelet a probe.
GIVEN_UP_S = 5.0
GOAL_P99_S = 1.0
#: Another address of the loopback than that of the API server.
FLOODS_FROM = "127.0.0.2"


def large() -> dict[str, object]:
    return manifest("8Gi", *(container(f"c{index}") for index in range(CONTAINERS)))


def flood(port: int, path: str, body: object, clients: int, ends: Event) -> None:
    """Send the body to a port of the loopback, each client again and again on new connections."""
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
                await reader.read(100)
                writer.transport.abort()
            except OSError:
                await asyncio.sleep(0.1)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    asyncio.run(run())


def measured(call: Callable[[], bool], seconds: float) -> str:
    """Call again and again; return how long the calls took and how many failed."""
    took_s, failed, end_s = [], 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        failed += not call()
        took_s.append(time.monotonic() - began_s)
        time.sleep(0.02)
    took_s.sort()
    p99_s = took_s[int(len(took_s) * 0.99) - (len(took_s) >= 100)]
    return (
        f"{len(took_s):4} calls, p50 {statistics.median(took_s) * 1e3:5.0f} ms, "
        f"p99 {p99_s * 1e3:5.0f} ms, failed {failed}"
    )


def tenant(site: Site) -> None:
    """Let a user create pods in the team's namespace, and nothing else."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{PODS.split('/')[4]}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    site.create(f"{rbac}/roles", {"metadata": {"name": "tenant"}, "rules": [rule]})
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "tenant"},
        "subjects": [{"kind": "User", "apiGroup": group, "name": "stranger"}],
    }
    site.create(f"{rbac}/rolebindings", binding)


def report(site: Site, probe: Callable[[], bool], seconds: float, what: str) -> None:
    def create(gpus: int) -> bool:
        obj = manifest("1Gi" if gpus else None, container(gpus=gpus))
        return site.send("POST", f"{PODS}?dryRun=All", obj).status == 201

    found: dict[str, str] = {}
    calls = {
        "GPU pods": lambda: create(1),
        "other pods": lambda: create(0),
        "probes": probe,
    }
    threads = [
        threading.Thread(target=lambda n=n, c=c: found.update({n: measured(c, seconds)}))
        for n, c in calls.items()
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for name, text in sorted(found.items()):
        sys.stdout.write(f"{what:32} {name:10} {text}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    options = parser.parse_args()
    with control_plane() as plane, installed(plane) as site:
        tenant(site)
        site.serve()
        server: WebhookServer | None = site.webhook
        assert server is not None
        created = manifest("1Gi")
        until(
            lambda: "schedulerName" in str(site.send("POST", f"{PODS}?dryRun=All", created).body),
            "the webhook is called",
        )

        def probe() -> bool:
            try:
                with server.prober() as http:
                    return http.get("/healthz", timeout=GIVEN_UP_S).status_code == 200
            except httpx.HTTPError:
                return False

        report(site, probe, options.seconds, "quiet")
        floods = {
            "direct calls": (server.port, "/mutate", review(large())),
            "dry runs of a tenant": (plane.port, f"{PODS}?dryRun=All", large()),
        }
        for what, (port, path, body) in floods.items():
            ends = multiprocessing.Event()
            arguments = (port, path, body, options.clients, ends)
            flooding = multiprocessing.Process(target=flood, args=arguments, daemon=True)
            flooding.start()
            time.sleep(2.0)  # until all of them send
            report(site, probe, options.seconds, f"{options.clients} clients, {what}")
            ends.set()
            flooding.join(10.0)
            flooding.kill()


if __name__ == "__main__":
    main()
