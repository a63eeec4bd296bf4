"""The first example: four pods that request 60 GiB on one 24 GiB GPU with four replicas."""

import msgspec
from rich.console import Console
from rich.syntax import Syntax

from benchmarks.demo.agents import Agents
from benchmarks.demo.fleet import Fleet, Group, Shape
from benchmarks.demo.referee import Referee
from benchmarks.demo.scheduler import (
    BindAnswer,
    FilterAnswer,
    binding_args,
    extender_args,
    unschedulable_message,
)
from benchmarks.demo.server import Server
from benchmarks.demo.wire import Connection, ServerFailed
from benchmarks.demo.workload import CONTAINER, SHARED, DemoPod
from headroom.contract.quantity import gib

_FLEET = Fleet((Group(Shape("L4", 1, 24 * 1024, 1), 1, 4),))
_PODS = tuple(
    DemoPod(name, 1, gibs * 1024)
    for name, gibs in (("llm-a", 16), ("llm-b", 20), ("llm-c", 16), ("llm-d", 8))
)
_MANIFEST = f"""\
apiVersion: v1
kind: Pod
metadata:
  name: llm-b
  annotations:
    headroom.gpu/vram: 20Gi      # the line that Headroom reads
spec:
  containers:
    - name: {CONTAINER}
      image: registry.example/llm:1
      resources:
        limits:
          {SHARED}: 1   # one of four replicas; no memory
"""


def tell(console: Console) -> None:
    """Print the outcome with stock Kubernetes, then with Headroom. Raises ``ServerFailed``."""
    requests = ", ".join(f"{pod.name} {gib(pod.request_bytes or 0)}" for pod in _PODS)
    console.rule("[bold]One 24 GiB GPU, four replicas, four pods, 60 GiB")
    console.print(f"They arrive in this order: {requests}. One of the four manifests:\n")
    console.print(Syntax(_MANIFEST, "yaml", background_color="default"))
    _stock(console)
    with Server(_FLEET.yaml()) as server:
        _headroom(console, server)


def _stock(console: Console) -> None:
    """Bind all four pods, as stock Kubernetes does, and print which of them die."""
    referee = Referee(_FLEET.for_referee(), seed=0)
    for pod in _PODS:
        referee.bound(pod.name, _FLEET.nodes[0].name, 1, pod.request_bytes)
        referee.admit()
    verdict = referee.verdict(useful_bytes=0)
    console.print("[bold]Stock Kubernetes[/] counts replicas: 4 free, 4 pods bound, all Running.")
    for pod in _PODS:
        dead = pod.name in verdict.died
        end = "[red]CUDA out of memory, CrashLoopBackOff[/]" if dead else "[green]lives[/]"
        console.print(f"  {pod.name}  {gib(pod.request_bytes or 0):>8}  {end}")
    console.print(f"  The pods request {gib(verdict.worst_excess_bytes)} more than the GPU has.\n")


def _headroom(console: Console, server: Server) -> None:
    """Schedule the four pods through the extender, and print its answers."""
    node = _FLEET.nodes[0].name
    console.print("[bold]Headroom[/] answers POST /filter with:")
    verbs = Connection(server.verbs_url)
    agents = Agents(_FLEET.nodes, _PODS, server.debug_url)
    referee = Referee(_FLEET.for_referee(), seed=0)
    for pod in _PODS:
        raw = verbs.call("/filter", extender_args(pod, [msgspec.json.encode(node)]))
        answer = msgspec.json.decode(raw, type=FilterAnswer)
        console.print(f"  {pod.name}  {gib(pod.request_bytes or 0):>8}  ", end="")
        console.print(raw.decode(), style="cyan", markup=False, soft_wrap=True)
        if answer.node_names:
            bind = msgspec.json.decode(
                verbs.call("/bind", binding_args(pod, node)), type=BindAnswer
            )
            if bind.error:
                raise ServerFailed(f"bind of {pod.name} was answered with Error: {bind.error}")
            referee.bound(pod.name, node, 1, pod.request_bytes)
            agents.report(referee.admit())
            console.print(f"    bound to {node}", style="green")
        else:
            message = unschedulable_message(answer.rejections)
            console.print(f"    FailedScheduling: {message}", style="yellow", soft_wrap=True)
    verbs.close()
    agents.close()
    verdict = referee.verdict(useful_bytes=0)
    console.print(
        f"  {verdict.bound} pods run on {gib(verdict.working_bytes)} of 24.0 GiB, "
        f"{len(_PODS) - verdict.bound} stay pending, {len(verdict.died)} die.\n"
    )
