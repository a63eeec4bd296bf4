"""Checks that the commands that ``make cluster`` prints work, and that Ctrl-C ends all
processes.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

from tests.controlplane import ROOT
from tests.deploy.pages import blocks, commands, matches, play, steps
from tests.processes import alive
from tests.waiting import PATIENCE_S, until

#: The last line of the output.
UP = "Ctrl-C ends all of it"
#: A Deployment in a different namespace than the default namespace of the kubeconfig.
TEAM = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: mine, namespace: team-a}
spec:
  replicas: 2
  selector: {matchLabels: {app: mine}}
  template:
    metadata: {labels: {app: mine}, annotations: {headroom.gpu/vram: 1Gi}}
    spec:
      containers: [{name: main, image: none, resources: {limits: {nvidia.com/gpu: 1}}}]
"""


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in map(int, child.read_text().split()):
            found += [each, *descendants(each)]
    return found


class Cluster:
    """A running ``make cluster``."""

    def __init__(self, process: "subprocess.Popen[bytes]", printed: Path) -> None:
        self.process = process
        self._printed = printed
        self.started: list[int] = []

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def await_up(self, processes: int | None = None) -> None:
        """Wait until the commands are printed, or until this number of processes run."""
        deadline_s = time.monotonic() + PATIENCE_S
        while UP not in self.printed:
            self.started = descendants(self.process.pid)
            if processes and len(self.started) >= processes:
                return
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline_s, self.printed
            time.sleep(0.1)
        self.started = descendants(self.process.pid)

    def interrupt(self) -> None:
        """Send SIGINT as Ctrl-C does, and wait until all processes have ended."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(PATIENCE_S)
        until(lambda: not any(map(alive, self.started)), "all started processes have ended")


@contextlib.contextmanager
def made(folder: Path) -> Iterator[Cluster]:
    # Use one process group, so that a signal reaches make and all of its children, like Ctrl-C.
    ((make, target),) = map(str.split, commands("get-started/local-cluster.md", "start"))
    entered = [make, "--old-file=.venv/test.stamp", f"RUN={sys.executable}", target]
    printed = folder / "printed"
    with (
        printed.open("w") as output,
        subprocess.Popen(
            entered,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Restore the handler, because SIGINT is ignored if a shell runs the tests in the
            # background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as command,
    ):
        cluster = Cluster(command, printed)
        try:
            yield cluster
        finally:
            left = [pid for pid in (command.pid, *cluster.started) if alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert not left, f"{len(left)} processes outlive Ctrl-C"
    assert "Traceback" not in cluster.printed
    assert not list(folder.glob("headroom-plane-*"))


def test_ctrl_c_during_the_start_ends_all_processes_of_make_cluster(
    binaries: None, tmp_path: Path
) -> None:
    with made(tmp_path) as cluster:
        cluster.await_up(processes=3)  # Python, etcd and kube-apiserver
        assert UP not in cluster.printed
        cluster.interrupt()


def test_ctrl_c_in_a_finalizer_is_not_lost() -> None:
    script = """
import time
from tests.e2e.__main__ import end_on_signals

class Finalized:
    def __del__(self):
        raise KeyboardInterrupt

end_on_signals()
try:
    Finalized()
    time.sleep(60)
except KeyboardInterrupt:
    print("ended")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ended\n", "")


def shell(script: str) -> str:
    """Run the commands and return their output. Fail if a command fails."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


#: Pods that docs/operate/security.md describes: one with a nodeName, and one with the priority of
#: Headroom's own parts.
BY_NODE_NAME = """\
apiVersion: v1
kind: Pod
metadata: {name: direct, namespace: team-b, annotations: {headroom.gpu/vram: 25%}}
spec:
  nodeName: gpu-3
  containers: [{name: main, image: none, resources: {limits: {nvidia.com/gpu: 1}}}]
"""
CRITICAL = BY_NODE_NAME.replace("nodeName: gpu-3", "priorityClassName: headroom-critical")
WORKLOADS = """\
apiVersion: batch/v1
kind: CronJob
metadata: {name: nightly, namespace: team-b}
spec:
  schedule: "0 0 1 1 *"
  jobTemplate: {spec: {template: {spec: {
    restartPolicy: Never, containers: [{name: main, image: none}]}}}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: store, namespace: team-b}
spec:
  serviceName: store
  selector: {matchLabels: {app: store}}
  template:
    metadata: {labels: {app: store}, annotations: {headroom.gpu/vram: 1Gi}}
    spec: {containers: [{name: main, image: none, resources: {limits: {nvidia.com/gpu: 1}}}]}
"""


def check_the_cluster(run: Callable[[str], str]) -> None:
    """Try what the docs state about every cluster with Headroom."""
    # kubectl shows healthy nodes, with an agent each, and their drivers.
    nodes = run("kubectl get nodes --no-headers").splitlines()
    assert [line.split()[1] for line in nodes] == ["Ready"] * 3
    assert "kubernetes.io/os=linux" in (described := run("kubectl describe node gpu-1"))
    assert "Failed to get lease" not in described
    drivers = run("kubectl get gpunodes -o wide --no-headers").splitlines()
    assert all(re.search(r" True +\d+s", line) for line in drivers), drivers
    agents = "kubectl -n headroom-system get daemonset headroom-agent --no-headers"
    assert run(agents).split()[:4] == ["headroom-agent", "3", "3", "3"]
    # All policies of the base are installed, and answer with their own words.
    policies = set(run("kubectl get validatingadmissionpolicies -o name").split())
    shipped = "grep -h '^metadata: {name: headroom' -B1 deploy/base/*.yaml"
    files = run(f"cd {ROOT}; {shipped} | grep -A1 'kind: ValidatingAdmissionPolicy$'")
    names = re.findall(r"name: ([\w-]+)", files)
    assert len(names) >= 10
    assert policies == {
        f"validatingadmissionpolicy.admissionregistration.k8s.io/{each}" for each in names
    }
    play("get-started/local-cluster.md", "bound", lambda each: (run(f"{each} 2>&1 || true"), 0))
    run("kubectl create namespace team-b")
    created = run(f"kubectl create -f - 2>&1 <<'EOF'\n{BY_NODE_NAME}EOF")
    assert "must be placed by Headroom, or it takes memory that is reserved" in created
    refused = run(f"kubectl create -f - 2>&1 <<'EOF' || true\n{CRITICAL}EOF")
    assert "PriorityClass headroom-critical is for Headroom's own pods" in refused
    placement = "kubectl annotate pod first --overwrite headroom.gpu/placement=x 2>&1 || true"
    assert "is written only by Headroom" in run(placement)
    # A pod that was bound without Headroom is counted, and shown as such.
    until(lambda: "direct" in run("kubectl headroom top pod -n team-b"), "it counts", every_s=1.0)
    assert "it was bound without Headroom" in run("kubectl headroom why direct -n team-b")
    # Controllers that users expect: StatefulSets, CronJobs, quotas, and the end of namespaces.
    run(f"kubectl create -f - <<'EOF'\n{WORKLOADS}EOF")
    run("kubectl -n team-b create job --from=cronjob/nightly once")
    run("kubectl -n team-b wait --for=condition=Ready --timeout=180s pod -l job-name=once")
    run("kubectl -n team-b create quota pods --hard=pods=2")
    run("kubectl -n team-b wait --for=jsonpath='{.status.used.pods}' quota/pods --timeout=180s")
    run("kubectl -n team-b rollout status statefulset/store --timeout=180s")
    # Agents stay on a drained node, as pods of a DaemonSet do.
    run("kubectl drain gpu-3 --ignore-daemonsets --force --timeout=180s 2>&1")
    assert run(agents).split()[:4] == ["headroom-agent", "3", "3", "3"]
    pods = run("kubectl get pods -A --field-selector spec.nodeName=gpu-3 -o name")
    assert pods == "pod/headroom-agent-gpu-3\n"
    run("kubectl uncordon gpu-3")
    run("kubectl delete namespace team-b --timeout=180s")


def check_a_request(run: Callable[[str], str]) -> None:
    """Create the pods of docs/how-to/request-memory.md, and compare their explanations with it."""
    run("kubectl delete pod mine share first --timeout=180s")  # The page has an empty GPU.
    parts = blocks("how-to/request-memory.md")
    outputs = {step.command: step.output or "" for each in parts for step in steps(each)}
    (llm,) = [each.text for each in parts if "name: llm\n" in each.text]
    huge = llm.replace("name: llm", "name: huge").replace("8Gi", "40Gi")
    for name, manifest in (("llm", llm), ("huge", huge)):
        run(f"kubectl create -f - <<'EOF'\n{manifest}EOF")
        command = f"kubectl headroom why {name}"
        until(
            lambda command=command: matches(run(command), outputs[command]),
            f"{command} prints what the page shows",
            every_s=1.0,
            logs=lambda command=command: run(command),
        )


def documented_pod() -> str:
    """Return the manifest of docs/get-started/helm.md that a new user copies."""
    (manifest,) = [
        block.text for block in blocks("get-started/helm.md") if "kind: Pod\n" in block.text
    ]
    return manifest


def test_the_printed_commands_and_the_documented_pod_work(binaries: None, tmp_path: Path) -> None:
    with made(tmp_path) as cluster:
        cluster.await_up()
        assert len(cluster.started) >= 6
        printed = [line.strip() for line in re.findall(r"^  \S.*$", cluster.printed, re.MULTILINE)]
        exports = "\n".join(line for line in printed if line.startswith("export "))
        assert "KUBECONFIG" in exports

        def kubectl(arguments: str) -> str:
            assert f"kubectl {arguments}" in printed
            return shell(f"{exports}\nkubectl {arguments}")

        def run(command: str) -> tuple[str, int]:
            return shell(f"{exports}\n{command}"), 0

        play("get-started/local-cluster.md", "why", run)

        header, *nodes = kubectl("get gpunodes").splitlines()
        assert re.split(r" {2,}", header.strip())[:6] == [
            *("NAME", "DEVICES", "MEMORY", "RESERVED", "USED", "FREE")
        ]
        amounts = [re.split(r" {2,}", line)[2:4] for line in nodes]
        assert sorted(amounts) == [
            *(["24.0 GiB", "0.0 GiB"], ["24.0 GiB", "0.0 GiB"], ["24.0 GiB", "20.0 GiB"])
        ]
        assert "TOTAL  3 nodes, 3 GPUs, 72.0 GiB allocatable" in kubectl("headroom top")
        events = kubectl("describe pod too-large")
        assert "3 insufficient GPU memory on any device" in events
        assert "larger than any GPU that it may use (24.0 GiB)" in kubectl("headroom why too-large")
        hint = re.search(r"More: (kubectl headroom why .*)$", events, re.MULTILINE)
        if hint:  # The Event may be a second late. Tests of the extender check its text.
            assert "Pod e2e/too-large: " in shell(f"{exports}\n{hint[1]}")

        own = re.search(r"^  (kubectl create -f - <<EOF\n.*?^  EOF)$", cluster.printed, re.M | re.S)
        assert own
        shell(exports + "\n" + re.sub(r"^  ", "", own[1], flags=re.MULTILINE))
        first = documented_pod()
        share = first.replace("name: first", "name: share").replace("8Gi", "25%")
        for manifest in (first, share):
            shell(f"{exports}\nkubectl create -f - <<'EOF'\n{manifest}EOF")
        shell(f"{exports}\nkubectl wait --for=condition=Ready --timeout=180s pod mine first share")
        until(
            lambda: "unconfirmed" not in shell(f"{exports}\nkubectl headroom top pod"),
            "all pods are on a GPU",
            every_s=1.0,
        )
        pods = shell(f"{exports}\nkubectl headroom top pod")
        assert re.search(r"^e2e +share +gpu-\d +0 +6\.0 GiB +6\.0 GiB  ok$", pods, re.MULTILINE)
        shell(f"{exports}\nkubectl delete pod first --timeout=180s")
        shell(f"{exports}\nkubectl create namespace team-a\nkubectl create -f - <<'EOF'\n{TEAM}EOF")
        shell(f"{exports}\nkubectl -n team-a rollout status deployment/mine --timeout=180s")
        shell(f"{exports}\nkubectl -n team-a delete deployment/mine --timeout=180s")
        until(
            lambda: not shell(f"{exports}\nkubectl headroom top pod -n team-a 2>/dev/null"),
            "the memory of the deleted pods is free",
            every_s=1.0,
        )
        play("get-started/local-cluster.md", "pod", run)
        check_the_cluster(lambda command: shell(f"{exports}\n{command}"))
        check_a_request(lambda command: shell(f"{exports}\n{command}"))

        page = re.search(r"^The page: (\S+)$", cluster.printed, re.MULTILINE)
        assert page
        with urlopen(page[1], timeout=PATIENCE_S) as answer:
            assert b"<title>Headroom</title>" in answer.read()
        cluster.interrupt()
