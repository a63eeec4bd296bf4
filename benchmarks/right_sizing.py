"""Shows ``headroom.gpu/vram: auto`` end to end: 40 pods that request too much fit on half the GPUs.

    python -m benchmarks.right_sizing [--rounds 3] [--seed 1]     # make auto

It runs a real etcd, API server, kube-scheduler and controller manager with extender, console,
webhook and recorder. Ten Deployments of four pods request 16 GiB each, on 20 GPUs of 24 GiB, so
half of the pods wait. Their pods use 3 to 7 GiB, a different amount in each life. After ``rounds``
of restarts the templates are changed to ``auto``. Nodes exist as Node objects only; the benchmark
plays kubelets, device plugins and agents.

After every step a judge, which imports nothing of the product, adds up the requests and the use of
the pods on each GPU. The command fails if a GPU is ever overcommitted, or if a pod still waits at
the end.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
import yaml

from agent.kube_publisher import NotDelivered
from benchmarks.hotpath.machine import machine
from headroom.contract.quantity import gib, parse_bytes
from tests.controlplane import ROOT, ApiRefused, built, control_plane
from tests.e2e.__main__ import act_as_kubelet, install_webhook, with_bytes
from tests.e2e.cluster import DEPLOYMENTS, NAMESPACE, PlayedCluster, pod_manifest
from tests.e2e.nodes import GIB, Shape
from tests.judge import excess

DEPLOYMENTS_COUNT, REPLICAS, NODES, GPUS_OF_NODE = 10, 4, 10, 2
PODS = DEPLOYMENTS_COUNT * REPLICAS
GPUS = NODES * GPUS_OF_NODE
MEMORY_BYTES = 24 * GIB
OVERSIZED = "16Gi"
#: Range of the typical peaks of Deployments in GiB, and the standard deviation of the logarithms of
#: the peaks of one Deployment's lives.
LEAST_GIB, MOST_GIB, SPREAD = 3.0, 7.0, 0.03
VRAM, PROFILES = (
    "headroom.gpu/vram",
    f"/apis/headroom.gpu/v1alpha1/namespaces/{NAMESPACE}/vramprofiles",
)
PATIENCE_S = 300.0


@dataclass
class Played:
    """The cluster, with the use of each life and what the judge found."""

    cluster: PlayedCluster
    chance: random.Random
    typical: dict[str, float]
    #: Uid of a pod -> the memory that it uses.
    peaks: dict[str, int] = field(default_factory=dict)
    overcommitted: set[str] = field(default_factory=set)
    steps: int = 0

    def peak_of(self, pod: Mapping[str, Any]) -> int:
        uid = pod["metadata"]["uid"]
        if uid not in self.peaks:
            factor = math.exp(self.chance.gauss(0, SPREAD))
            self.peaks[uid] = int(self.typical[pod["metadata"]["labels"]["app"]] * factor)
        return self.peaks[uid]

    def step(self) -> None:
        """Act as all kubelets and agents once, then judge."""
        with suppress(NotDelivered, ApiRefused):
            pods = self.cluster.pods()
            for pod in pods:
                act_as_kubelet(self.cluster, pod)
            self.cluster.nodes.observe(list(map(with_bytes, pods)))
            self.cluster.nodes.beat(self.cluster.names)
            self.judge(pods)
        self.steps += 1
        time.sleep(0.2)

    def judge(self, pods: list[dict[str, Any]]) -> None:
        requests = {
            pod["metadata"]["uid"]: parse_bytes(pod["metadata"]["annotations"][VRAM])
            for pod in pods
            if pod["spec"].get("nodeName")
        }
        rows = self.rows()
        has = {
            f"GPU-{node}-{i}": MEMORY_BYTES
            for node in self.cluster.names
            for i in range(GPUS_OF_NODE)
        }
        taken = [(device, requests[uid]) for uid, device in rows if uid in requests]
        used = [(device, self.peaks[uid]) for uid, device in rows]
        self.overcommitted |= excess(taken, has).keys() | excess(used, has).keys()

    def rows(self) -> list[tuple[str, str]]:
        """Return the uid of each running pod and its device."""
        return [
            (use.uid, use.device)
            for node in self.cluster.names
            for use in self.cluster.nodes.status(node).pods
        ]

    def until(self, true: Callable[[], bool], what: str) -> float:
        """Play until the condition is true; return the seconds. If that takes too long, stop the
        command."""
        began_s = time.monotonic()
        while not true():
            self.step()
            if time.monotonic() - began_s > PATIENCE_S:
                sys.exit(f"after {PATIENCE_S:.0f} s: not yet {what}\n{self.state()}")
        return time.monotonic() - began_s

    def state(self) -> str:
        return f"{self.running()} of {PODS} pods run on {self.gpus()} of {GPUS} GPUs"

    def running(self) -> int:
        return len({uid for uid, _ in self.rows()})

    def gpus(self) -> int:
        return len({device for _, device in self.rows()})


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Restarts of all pods.")] = 3, seed: int = 1
) -> None:
    built("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
    typer.echo(f"{machine()}; seed {seed}")
    with played(seed) as play:
        _fill(play)
        typer.echo(f"requests of {OVERSIZED}: {play.state()}")
        _restart(play, rounds)
        accepted = _simulated(play)
        typer.echo(f"simulated before the change: {accepted['message']}")
        seconds = _change_to_auto(play)
        requests = _requests(play)
        above = sum(play.peaks[uid] > each for uid, each in requests.items())
        typer.echo(
            f"auto, {seconds:.0f} s later: {play.state()}, requests of "
            f"{gib(min(requests.values()))} to {gib(max(requests.values()), up=True)}, "
            f"{above} pods use more than they request"
        )
        typer.echo(
            f"judged {play.steps} times: {len(play.overcommitted)} overcommitted GPUs; "
            f"{len(play.peaks)} lives in all"
        )
        if play.overcommitted or play.running() != PODS:
            sys.exit("failed")


@contextmanager
def played(seed: int) -> Iterator[Played]:
    """Yield a cluster in which all parts run."""
    with control_plane() as plane:
        cluster = PlayedCluster(plane, NODES, Shape(gpus=GPUS_OF_NODE), seed)
        try:
            cluster.create()
            crd = yaml.safe_load((ROOT / "deploy/base/crd-vramprofile.yaml").read_text())
            plane.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
            cluster.until(lambda: _served(cluster), "VRAMProfiles are served")
            chance = random.Random(seed)
            typical = {
                f"app-{n}": chance.uniform(LEAST_GIB, MOST_GIB) * GIB
                for n in range(DEPLOYMENTS_COUNT)
            }
            play = Played(cluster, chance, typical)
            cluster.nodes.peak_of = play.peak_of
            cluster.start_controller_manager()
            cluster.bring_up()
            install_webhook(cluster)
            kubeconfig = str(plane.kubeconfig("recorder-of-the-tests"))
            plane.fork("recorder", "tests.hasty", "recorder", env={"KUBECONFIG": kubeconfig})
            yield play
        finally:
            cluster.close()


def _served(cluster: PlayedCluster) -> bool:
    try:
        cluster.plane.call("GET", PROFILES)
    except ApiRefused:
        return False
    return True


def _fill(play: Played) -> None:
    """Create the Deployments, so that each GPU has a pod and the other pods wait."""
    for name in play.typical:
        template = pod_manifest(OVERSIZED)
        template["metadata"]["labels"] = {"app": name}
        spec = {
            "replicas": REPLICAS // 2,
            "selector": {"matchLabels": {"app": name}},
            # The GPUs have no space for a second copy of each pod.
            "strategy": {"type": "Recreate"},
            "template": template,
        }
        play.cluster.plane.call("POST", DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec})
    play.until(lambda: play.running() == GPUS, "that each GPU has a pod")
    for name in play.typical:
        path = f"{DEPLOYMENTS}/{name}"
        play.cluster.plane.call("PATCH", path, {"spec": {"replicas": REPLICAS}})
    play.until(lambda: len(play.cluster.pods()) == PODS, "that all pods exist")


def _restart(play: Played, rounds: int) -> None:
    """Delete the running pods several times, and wait until the recorder has their lives."""
    for number in range(rounds):
        uids = {uid for uid, _ in play.rows()}
        for pod in play.cluster.pods():
            if pod["metadata"]["uid"] in uids:
                play.cluster.delete_pod(pod["metadata"]["name"])
        ended = GPUS * (number + 1)
        play.until(
            lambda uids=uids, ended=ended: (
                play.running() == GPUS
                and not uids & {uid for uid, _ in play.rows()}
                and _recorded(play) >= ended
            ),
            "that the lives of a round are recorded",
        )


def _recorded(play: Played) -> int:
    """Return the number of ended lives in the VRAMProfiles."""
    return sum(
        track.get("ended", 0)
        for profile in play.cluster.plane.call("GET", PROFILES)["items"]
        for container in profile["status"]["containers"]
        for track in container["tracks"]
    )


def _simulated(play: Played) -> dict[str, Any]:
    url = f"{play.cluster.debug_url()}/v1/recommendations?accepted=true"
    play.until(
        lambda: len(httpx.get(url, timeout=30).json()["recommendations"]) == DEPLOYMENTS_COUNT,
        "that the console has all profiles",
    )
    found: dict[str, Any] = httpx.get(url, timeout=30).json()["accepted"]
    return found


def _change_to_auto(play: Played) -> float:
    for name in play.typical:
        template = {"metadata": {"annotations": {VRAM: "auto"}}}
        path = f"{DEPLOYMENTS}/{name}"
        play.cluster.plane.call("PATCH", path, {"spec": {"template": template}})

    def changed() -> bool:
        return play.running() == PODS and len(_requests(play)) == PODS

    return play.until(changed, "that all pods run with recommended requests")


def _requests(play: Played) -> dict[str, int]:
    """Return uid -> request in bytes of the pods that the webhook gave a recommendation."""
    found: dict[str, int] = {}
    for pod in play.cluster.pods():
        annotations = pod["metadata"].get("annotations", {})
        if annotations.get("headroom.gpu/vram-requested") == "auto":
            found[pod["metadata"]["uid"]] = parse_bytes(annotations[VRAM])
    return found


if __name__ == "__main__":
    typer.run(main)
