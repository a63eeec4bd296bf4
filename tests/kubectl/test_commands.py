"""`kubectl headroom` with a real extender."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from headroom.__main__ import DEBUG_API_COMMANDS
from headroom.kubectl.commands import app
from headroom.plugin import complete, main
from tests.controlplane import ROOT
from tests.processes import starts_processes
from tests.serving import Server, serving
from tests.waiting import until

FLEET = """\
nodes:
  - {name: shared, count: 2, gpus: 2, memory: 24Gi, model: L4, sharing: time-slicing, replicas: 4}
  - {name: whole, gpus: 1, memory: 80Gi, model: H100}
"""
NODES = ["shared-0000", "shared-0001", "whole"]


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    """With a pod that runs on shared-0000, and one that is too large for every node."""
    with serving(FLEET) as started:
        for name, vram in (("fits", "7Gi"), ("large", "90Gi")):
            asked = started.post("/filter", {"Pod": pod(name, vram), "NodeNames": NODES})
            assert asked.status == 200
        binding = {"PodName": "fits", "PodNamespace": "team-a", "PodUID": "uid-fits"}
        bound = started.post("/bind", binding | {"Node": NODES[0]})
        assert bound.json() == {"Error": ""}
        yield started


def pod(name: str, vram: str) -> dict[str, Any]:
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    metadata = {"namespace": "team-a", "name": name, "uid": f"uid-{name}"}
    annotations = {"headroom.gpu/vram": vram}
    return {
        "metadata": metadata | {"annotations": annotations},
        "spec": {"containers": [container]},
    }


@dataclass(frozen=True, slots=True)
class Shown:
    returncode: int
    stdout: str
    stderr: str


def run(address: str, *arguments: str) -> Shown:
    """In this process: another one takes longer to start than to ask."""
    stdout, stderr = io.StringIO(), io.StringIO()
    returncode = 0
    with (
        mock.patch.dict(os.environ, {"HEADROOM_SERVER": address, "HOME": "/nonexistent"}),
        mock.patch.object(sys, "argv", ["kubectl-headroom", *arguments]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as err:
            returncode = int(err.code or 0)
    return Shown(returncode, stdout.getvalue(), stderr.getvalue())


def rows(shown: str) -> list[list[str]]:
    """Cells; two spaces or more are between columns."""
    return [[cell for cell in line.split("  ") if cell.strip()] for line in shown.splitlines()]


def test_top_shows_reserved_and_free_memory_of_each_node(server: Server) -> None:
    shown = run(server.debug, "top")
    assert shown.returncode == 0
    header, *lines = [[cell.strip() for cell in row] for row in rows(shown.stdout)]
    assert header[:4] == ["NODE", "GPUS", "ALLOCATABLE", "RESERVED"]
    assert [line[0] for line in lines] == NODES
    # The plugin may give the pod either device: its 7 GiB are kept free on both.
    assert lines[0][1:7] == ["2", "48.0 GiB", "14.0 GiB", "0.0 GiB", "0.0 GiB", "34.0 GiB"]
    assert lines[2][1:4] == ["1", "80.0 GiB", "0.0 GiB"]
    wide, *described = rows(run(server.debug, "top", "-o", "wide").stdout)
    assert [cell.strip() for cell in wide[-5:]] == [
        "MODELS",
        "SHARING",
        "NEXT DEVICE",
        "OBSERVED AT",
        "TAINTS",
    ]
    assert [cell.strip() for cell in described[0][-5:-2]] == [
        "L4",
        "time-slicing",
        "predicted",
    ]
    assert "\x1b" not in shown.stdout  # no colour where nobody sees it


def test_top_lists_gpus_and_pods(server: Server) -> None:
    gpus = run(server.debug, "top", "gpu").stdout.splitlines()
    assert len(gpus) == 1 + 2 * 2 + 1
    assert "4/4 free" in gpus[1]
    assert "GPU-whole-0" not in gpus[-1]
    assert "GPU-whole-0" in run(server.debug, "top", "gpu", "-o", "wide").stdout
    held = run(server.debug, "top", "pod", "-n", "team-a").stdout.splitlines()
    assert [line.split()[:4] for line in held[1:]] == [
        ["team-a", "fits", "shared-0000", "0"],
        ["team-a", "fits", "shared-0000", "1"],
    ]
    wide = run(server.debug, "top", "pod", "-n", "team-a", "-o", "wide").stdout.splitlines()
    assert [line.split()[-2] for line in wide[1:]] == ["GPU-shared-0000-0", "GPU-shared-0000-1"]
    elsewhere = run(server.debug, "top", "pod", "-n", "team-b")
    assert (elsewhere.stdout, elsewhere.stderr) == ("", "nothing to show\n")
    assert run(server.debug, "top", "pod", "-A").stdout.splitlines() == held


def test_why_shows_the_request_what_the_pod_lacks_and_suggestions(server: Server) -> None:
    shown = run(server.debug, "why", "team-a/large").stdout
    assert shown.startswith(
        "Pod team-a/large: no node can take the pod: it needs 90.0 GiB, larger than any GPU that "
        "it may use (80.0 GiB)\n  requests 90Gi on each"
    )
    assert "3 nodes: insufficient GPU memory on any device" in shown
    assert "needs 90.0 GiB, 80.0 GiB free, 10.0 GiB short" in shown
    assert "headroom.gpu/vram" in shown.partition("Suggestions")[2]
    assert "kube-scheduler offered 3 nodes, of which 0 could take the pod" in shown
    assert run(server.debug, "why", "large", "-n", "team-a").stdout == shown
    bound = run(server.debug, "why", "team-a/fits").stdout
    assert bound.startswith("Pod team-a/fits: bound to node shared-0000\n")
    assert "headroom.gpu/placement: " in bound


def test_score_shows_every_term_or_every_failed_check(server: Server) -> None:
    shown = run(server.debug, "score", "team-a/fits", "--node", "shared-0001")
    assert shown.stdout.startswith("shared-0001: fits, on any of 2 candidates\n")
    terms = re.findall(r"^  (\w+) +([\d.]+) x ([\d.]+) = ([\d.]+)$", shown.stdout, re.MULTILINE)
    assert {"packing", "prediction", "sm_activity"} <= {name for name, *_ in terms}
    for _, value, part, contribution in terms:
        assert float(value) * float(part) == pytest.approx(float(contribution), abs=0.01)
    assert re.search(r"rank \d of 3 nodes that fit", shown.stdout)
    assert re.search(
        r"\nDecided at \S+ \(decision \S+, source: decision\)\n  bind: bound", shown.stdout
    )
    rejected = run(server.debug, "score", "large", "-n", "team-a", "--node", "whole").stdout
    assert "fails: insufficient GPU memory on any device" in rejected
    assert run(server.debug, "score", "team-a/large").stdout == rejected  # the nearest one
    nowhere = run(server.debug, "score", "team-a/fits", "--node", "nowhere")
    assert nowhere.returncode == 1
    assert "node nowhere is not known" in nowhere.stderr


def test_capacity_counts_pods_that_fit_and_shows_the_largest(server: Server) -> None:
    shown = run(server.debug, "capacity", "--vram", "20Gi").stdout
    # One on each device but that of the pod on its way, whichever it is.
    assert shown.startswith("4 such pods fit now, on 3 of 3 nodes")
    assert re.search(r"^H100 +80.0 GiB +1 +1 +80.0 GiB", shown, re.MULTILINE)
    bad = run(server.debug, "capacity", "--vram", "much")
    assert bad.returncode == 2
    assert "annotation headroom.gpu/vram: 'much' is not valid" in bad.stderr


def test_capacity_by_node_has_a_line_for_each_node(server: Server) -> None:
    shown = run(server.debug, "capacity", "--vram", "20Gi", "--by-node").stdout
    fitting = re.findall(r"^(\S+) +(\d+) +\S+ GiB", shown, re.MULTILINE)
    assert dict(fitting) == {"shared-0000": "1", "shared-0001": "2", "whole": "1"}


def test_top_adds_up_the_gpus_of_a_model(server: Server) -> None:
    shown = run(server.debug, "top", "model")
    header, l4, h100 = [[cell.strip() for cell in row] for row in rows(shown.stdout)]
    assert header[:4] == ["MODEL", "GPUS", "ALLOCATABLE", "RESERVED"]
    assert h100[:4] == ["H100", "1", "80.0 GiB", "0.0 GiB"]
    assert l4[:4] == ["L4", "4", "96.0 GiB", "14.0 GiB"]
    rejected = run(server.debug, "top", "model", "--fullest")
    assert (rejected.returncode, "remove them" in rejected.stderr) == (2, True)


def test_top_sorts_and_selects_nodes(server: Server) -> None:
    def names(*options: str) -> list[str]:
        return [line.split()[0] for line in run(server.debug, "top", *options).stdout.splitlines()]

    assert names("--search", "shared-0001")[1:] == ["shared-0001"]
    assert names("--fullest")[1:][0] == "shared-0000"
    assert names("--troubled") == []


def test_pending_shows_what_each_pod_lacks(server: Server) -> None:
    shown = run(server.debug, "pending").stdout
    waits = next(line for line in shown.splitlines() if " large " in line)
    assert re.search(r"^team-a +large .* 1 x 90Gi nvidia.com/gpu +0 +whole +10.0 GiB ", waits)


def test_decisions_are_listed_and_selected(server: Server) -> None:
    shown = run(server.debug, "decisions", "--pod", "team-a/fits").stdout
    assert re.search(r" team-a +fits .* shared-0000 +bound ", shown)
    assert "large" not in shown
    rejected = run(server.debug, "decisions", "--pod", "team-a/large", "-o", "wide").stdout
    assert re.search(r" 3 nodes: insufficient GPU memory .* uid-large\S* +[\d.]+ ms", rejected)
    one = run(server.debug, "decisions", "--limit", "1")
    assert len(one.stdout.splitlines()) == 2
    assert one.stderr == "there are more: raise --limit\n"


def test_whatif_shows_placements_and_changes_nothing(server: Server) -> None:
    before = server.get("/v1/nodes").json()["nodes"]
    drained = run(server.debug, "whatif", "--drain", "shared-0000", "--pods", "1", "--vram", "70Gi")
    assert drained.returncode == 0
    assert re.search(r"^team-a/fits +shared-0000 +shared-0001 ", drained.stdout, re.MULTILINE)
    assert re.search(r"^default/asked-0 +- +whole ", drained.stdout, re.MULTILINE)
    rejected = run(server.debug, "whatif", "--pods", "2", "--vram", "70Gi")
    assert rejected.returncode == 1
    assert "1 of 2 pods is placed" in rejected.stdout
    more = run(server.debug, "whatif", "--pods", "2", "--vram", "70Gi", "--add", "whole=1")
    assert more.returncode == 0
    after = server.get("/v1/nodes").json()["nodes"]
    for node in before + after:
        del node["report_age_s"]
    assert before == after


def test_invalid_counts_are_rejected_with_an_example(server: Server) -> None:
    bad = run(server.debug, "whatif", "--replicas", "shared-0000")
    assert bad.returncode == 2
    assert "Example: --replicas gpu-a=4" in bad.stderr


def test_log_lists_what_changed_and_follows_it(server: Server) -> None:
    reserved = re.compile(r"reservation_made +bind +team-a/fits +shared-0000")
    until(lambda: reserved.search(run(server.debug, "log").stdout), "the promise is told")
    environment = {"PATH": "/usr/bin:/bin", "HEADROOM_SERVER": server.debug}
    command = [sys.executable, "-m", "headroom", "log", "-f"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            asked = {"Pod": pod("later", "90Gi"), "NodeNames": NODES}
            told = ""
            while "team-a/later" not in told:
                assert process.poll() is None
                assert server.post("/filter", asked).status == 200
                told = process.stdout.readline()
            assert "decision  rejected  team-a/later" in told
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_snapshot_without_names_has_none(server: Server) -> None:
    whole = run(server.debug, "snapshot").stdout
    redacted = run(server.debug, "snapshot", "--redact").stdout
    assert json.loads(whole)["head"]["redacted"] is False
    assert json.loads(redacted)["head"]["redacted"] is True
    for name in ("team-a", "large", "shared-0000"):
        assert name in whole
        assert name not in redacted


def test_json_and_yaml_are_the_body_of_the_answer(server: Server) -> None:
    answered = server.get("/v1/explain/pods/team-a/large").json()
    as_json = json.loads(run(server.debug, "why", "team-a/large", "-o", "json").stdout)
    as_yaml = yaml.safe_load(run(server.debug, "why", "team-a/large", "-o", "yaml").stdout)
    for body in (answered, as_json, as_yaml):
        del body["generatedAt"]
    assert answered == as_json == as_yaml


def test_headroom_has_the_same_commands(server: Server) -> None:
    own = run(server.debug, "drift", "-A").stdout
    assert own.splitlines()[1].split()[:4] == ["team-a", "fits", "shared-0000", "waiting"]
    environment = {"PATH": "/usr/bin:/bin", "HEADROOM_SERVER": server.debug}
    command = [sys.executable, "-m", "headroom", "drift", "-A"]
    also = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    assert also.stdout.decode() == own


def test_headroom_has_every_command_that_reads_the_debug_api() -> None:
    commands = {str(each.callback and each.callback.__name__) for each in app.registered_commands}
    assert commands - {"doctor"} == DEBUG_API_COMMANDS


def test_the_page_is_served_only_with_the_key_of_its_address(server: Server) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HEADROOM_SERVER": server.debug}
    command = [sys.executable, "-m", "headroom.plugin", "ui", "--no-browser"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # It is ignored in what a shell runs in its background, and that is handed on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0].decode()
            with urlopen(url, timeout=30) as page:
                assert b"<title>Headroom</title>" in page.read()
            with urlopen(f"{url}v1/nodes", timeout=30) as nodes:
                names = [node["name"] for node in json.load(nodes)["nodes"]]
            assert names == NODES
            without_key = "/".join(url.split("/")[:3])
            with pytest.raises(HTTPError) as rejected:
                urlopen(f"{without_key}/v1/nodes", timeout=30)
            rejected.value.close()
            assert rejected.value.code == 404
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_an_unknown_pod_exits_with_1(server: Server) -> None:
    rejected = run(server.debug, "why", "team-a/nobody")
    assert rejected.returncode == 1
    assert rejected.stderr.startswith("kubectl headroom: pod team-a/nobody is not known: ")


def test_an_unreachable_address_exits_with_3() -> None:
    rejected = run("http://127.0.0.1:1", "top")
    assert rejected.returncode == 3
    assert rejected.stderr.startswith("kubectl headroom: http://127.0.0.1:1 does not answer: ")
    bad = run("127.0.0.1:8889", "top")
    assert bad.returncode == 2
    assert "Example: http://127.0.0.1:8889" in bad.stderr


def test_a_missing_kubeconfig_has_its_own_message() -> None:
    rejected = run("", "top")
    assert rejected.returncode == 3
    (line,) = rejected.stderr.splitlines()
    assert line.startswith("kubectl headroom: no cluster is configured: ")
    assert "--server http://127.0.0.1:8889" in line


def test_the_doctor_is_a_command_of_the_plugin(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "nodes: [{name: a, gpus: 1, memory: 1Gi, annotations: {headroom.gpu/reserve: x}}]"
    )
    told = run("", "doctor", "--fleet", str(fleet))
    assert told.stdout.startswith("warning: a: takes no pods: it is annotated")
    assert told.returncode == 1
    (one,) = json.loads(run("", "doctor", "--fleet", str(fleet), "-o", "json").stdout)
    assert (one["weight"], one["nodes"]) == ("warning", ["a"])
    assert yaml.safe_load(run("", "doctor", "--fleet", str(fleet), "-o", "yaml").stdout) == [one]
    assert "--scheduler-config" in run("", "doctor", "--help").stdout


@pytest.mark.parametrize("before", [True, False])
def test_the_doctor_takes_the_context_before_and_after_its_name(
    tmp_path: Path, before: bool
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{kind: Config, apiVersion: v1, clusters: [], users: [], contexts: [], current-context: c}"
    )
    where = ["--kubeconfig", str(kubeconfig), "--context", "of-nobody"]
    told = run("", *where, "doctor") if before else run("", "doctor", *where)
    assert told.returncode == 2
    assert "of-nobody" in told.stderr


def test_version_is_printed() -> None:
    shown = run("", "--version")
    assert shown.returncode == 0
    assert shown.stdout.startswith("kubectl headroom: ")


def offered(*words: str) -> list[str]:
    """As kubectl asks: the words after `headroom`."""
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["kubectl_complete-headroom", *words]),
        contextlib.redirect_stdout(said),
    ):
        complete()
    *lines, directive = said.getvalue().splitlines()
    assert directive == ":4"
    return [line.partition("\t")[0] for line in lines]


def test_kubectl_gets_completions() -> None:
    assert {"top", "why", "doctor"} <= set(offered(""))
    assert offered("do") == ["doctor"]
    assert offered("top", "") == ["node", "gpu", "pod", "model"]
    assert offered("doctor", "--sch") == ["--scheduler-config"]
    assert offered("--context", "it's one", "cap") == ["capacity"]
    assert offered("who") == []
    assert offered() == offered("")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["log"], id="log"),
        pytest.param(["log", "-f"], id="log -f"),
        pytest.param(["decisions"], id="decisions"),
    ],
)
def test_an_invalid_time_exits_with_2_and_an_example(server: Server, command: list[str]) -> None:
    bad = run(server.debug, *command, "--since", "nonsense")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == (
        "kubectl headroom: --since: 'nonsense' is neither a time nor an age. "
        "Example: --since 15m or --since 2026-11-21T10:00:00Z\n"
    )


def test_errors_name_the_option_of_a_query_parameter(server: Server) -> None:
    bad = run(server.debug, "capacity", "--vram", "1Gi", "--gpus", "0")
    assert bad.returncode == 2
    assert bad.stderr.startswith("kubectl headroom: --gpus: ")
    assert bad.stderr.endswith("Example: --gpus 1\n")
