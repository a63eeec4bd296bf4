"""Tests `kubectl headroom` with a real extender."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from tests.controlplane import ROOT
from tests.kubectl.served_fleet import NODES, pod, rows, server
from tests.kubectl.transcripts import run
from tests.serving import Server
from tests.waiting import PATIENCE_S, until

__all__ = ["server"]


def test_top_lists_gpus_and_pods(server: Server) -> None:
    gpus = run(server.debug, "top", "gpus").stdout.splitlines()
    assert len(gpus) == 1 + 2 * 2 + 1 + 4
    assert [line.split()[:2] for line in gpus[1:3]] == [["shared-0000", "0"], ["shared-0000", "1"]]
    assert " 4/4 " in gpus[1]
    assert "GPU-whole-0" not in "".join(gpus)
    assert "GPU-whole-0" in run(server.debug, "top", "gpu", "-o", "wide").stdout
    held = run(server.debug, "top", "pod", "-n", "team-a").stdout
    assert held.splitlines() == [
        "NAMESPACE  POD   NODE         GPU     RESERVED  USED  STATE",
        "team-a     fits  shared-0000  0 or 1   7.0 GiB     -  unconfirmed",
    ]
    wide = run(server.debug, "top", "pod", "-n", "team-a", "-o", "wide").stdout
    assert "  GPU-shared-0000-0, GPU-shared-0000-1  uid-fits  unconfirmed\n" in wide
    elsewhere = run(server.debug, "top", "pod", "-n", "team-b")
    assert elsewhere.stdout == ""
    assert elsewhere.stderr == (
        "no pod in namespace team-b has a GPU; -A shows pods of all namespaces\n"
    )
    assert run(server.debug, "top", "pod", "-A").stdout == held


def test_names_select_nodes_gpus_and_pods(server: Server) -> None:
    node = run(server.debug, "top", "node", "shared-0000").stdout
    assert [line.split()[0] for line in node.splitlines()[1:3]] == ["shared-0000", "TOTAL"]
    gpus = run(server.debug, "--no-headers", "top", "gpu", "shared-0000").stdout
    assert [line.split()[:2] for line in gpus.splitlines()] == [
        ["shared-0000", "0"],
        ["shared-0000", "1"],
    ]
    pods = run(server.debug, "top", "pod", "fits", "-n", "team-a", "--no-headers").stdout
    assert [line.split()[:2] for line in pods.splitlines()] == [["team-a", "fits"]]
    for words, missing in (
        (("node", "shared-0000", "nix"), "no node nix with a GPU"),
        (("gpu", "nix"), "no node nix with a GPU"),
        (("pod", "fits", "nix", "-n", "team-a"), "no pod nix with a GPU in namespace team-a"),
        (("pod", "fits", "-n", "team-b"), "no pod fits with a GPU in namespace team-b"),
        (("model", "nix"), "no model nix with a GPU"),
    ):
        rejected = run(server.debug, "top", *words)
        assert (rejected.returncode, rejected.stdout) == (1, "")
        assert rejected.stderr == f"kubectl headroom: {missing}\n"


def test_names_of_resources_and_templates_are_printed_as_by_kubectl(server: Server) -> None:
    names = run(server.debug, "top", "gpu", "shared-0000", "-o", "name")
    assert names.stdout == "node/shared-0000\n"
    assert run(server.debug, "top", "pod", "-A", "-o=name").stdout == "pod/fits\n"
    assert "pod/large\n" in run(server.debug, "pending", "-A", "-o", "name").stdout
    whole = json.loads(run(server.debug, "top", "-o", "json").stdout)
    listed = run(server.debug, "top", "-o", "jsonpath={.nodes[*].name}")
    assert listed.stdout.split() == [each["name"] for each in whole["nodes"]]
    template = run(server.debug, "top", "-o", "go-template={{len .nodes}}")
    assert template.stdout == str(len(whole["nodes"]))
    wrong = run(server.debug, "top", "-o", "jsonpath={.nodes[}")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "-o jsonpath={.nodes[}: " in wrong.stderr
    for words in (("why", "fits", "-o", "name"), ("quota", "-o", "wide"), ("top", "-o", "xml")):
        rejected = run(server.debug, *words)
        assert rejected.returncode == 2
        assert f"'{words[-1]}' is not one of json, yaml" in rejected.stderr
    assert run(server.debug, "costs", "-A").returncode == 0
    rejected = run(server.debug, "top", "model", "-o", "name")
    assert "-o name prints nodes and pods" in rejected.stderr


def test_why_shows_the_request_the_missing_memory_and_suggestions(server: Server) -> None:
    shown = run(server.debug, "why", "team-a/large").stdout
    assert shown.startswith(
        "Pod team-a/large: no node can take the pod: it needs 90.0 GiB, larger than any GPU that "
        "it may use (80.0 GiB)\n  requests 1 nvidia.com/gpu with 90Gi"
    )
    assert "3 nodes: insufficient GPU memory on any device" in shown
    assert "needs 90.0 GiB, 80.0 GiB free, 10.0 GiB short" in shown
    assert "headroom.gpu/vram" in shown.partition("Suggestions")[2]
    assert "kube-scheduler offered 3 nodes, of which none could take the pod" in shown
    assert run(server.debug, "why", "large", "-n", "team-a").stdout == shown
    assert run(server.debug, "why", "pod/large", "-n", "team-a").stdout == shown
    bound = run(server.debug, "why", "team-a/fits").stdout
    assert bound.startswith("Pod team-a/fits: bound to node shared-0000\n")
    assert "  reserved 7.0 GiB on each of 2 GPUs that it could get, such as GPU-shared" in bound
    assert "headroom.gpu/placement: " not in bound
    wide = run(server.debug, "why", "team-a/fits", "-o", "wide").stdout
    assert "headroom.gpu/placement: " in wide


def test_score_shows_every_term_or_every_failed_check(server: Server) -> None:
    shown = run(server.debug, "score", "team-a/fits", "--node", "shared-0001")
    assert shown.stdout.startswith("shared-0001: fits, on any of 2 candidates\n")
    terms = re.findall(r"^  (\w+) +([\d.]+) x ([\d.]+) = ([\d.]+)$", shown.stdout, re.MULTILINE)
    assert {"packing", "prediction", "sm_activity"} <= {name for name, *_ in terms}
    for _, value, part, contribution in terms:
        assert float(value) * float(part) == pytest.approx(float(contribution), abs=0.01)
    assert re.search(r"rank \d of 3 nodes that fit", shown.stdout)
    assert re.search(
        r"\nDecided at \S+ \(decision \S+, source: decision\)\n  filter: 3 of 3 nodes fit, .*\n"
        r"  bind: bound",
        shown.stdout,
    )
    rejected = run(server.debug, "score", "large", "-n", "team-a", "--node", "whole").stdout
    assert "fails: insufficient GPU memory on any device" in rejected
    ranked = run(server.debug, "score", "team-a/fits").stdout.splitlines()
    assert ranked[0].split() == ["NODE", "RANK", "SCORE", "STATE"]
    assert ranked[1].split()[1] == "1"
    wide = run(server.debug, "score", "team-a/fits", "-o", "wide").stdout.splitlines()
    assert wide[0].split()[3:6] == ["NEXT", "DEVICE", "PACKING"]
    none = run(server.debug, "score", "team-a/large", "--limit", "2")
    assert all(line.split()[1:3] == ["-", "-"] for line in none.stdout.splitlines()[1:])
    assert none.stderr == "more are not shown: raise --limit. Example: --limit 1000\n"
    names = run(server.debug, "score", "team-a/fits", "-o", "name").stdout.splitlines()
    assert names == [f"node/{line.split()[0]}" for line in ranked[1:4]]
    no_names = run(server.debug, "score", "team-a/large", "-o", "name")
    assert (no_names.returncode, no_names.stdout) == (1, "")
    assert no_names.stderr == "the pod fits on no node\n"
    nowhere = run(server.debug, "score", "team-a/fits", "--node", "nowhere")
    assert nowhere.returncode == 1
    assert "node nowhere is not known" in nowhere.stderr


DEPLOYMENT = """\
# Two documents; the first has no pod.
apiVersion: v1
kind: Service
metadata: {name: web}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: team-a}
spec:
  template:
    metadata:
      annotations: {headroom.gpu/vram: VRAM}
    spec:
      containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]
"""


def test_score_ranks_nodes_for_a_manifest_that_was_not_created(
    server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(DEPLOYMENT.replace("VRAM", "30Gi"))
    ranked = run(server.debug, "score", "-f", str(file)).stdout.splitlines()
    assert ranked[1].split()[:2] == ["whole", "1"]
    assert "insufficient GPU memory on any device" in ranked[2]
    one = run(server.debug, "score", "-f", str(file), "--node", "shared-0001").stdout
    assert one.startswith("shared-0001: insufficient GPU memory on any device")
    assert "shared-0001 cannot take it: insufficient GPU memory on any device; whole fits" in one
    for text, message in (
        (DEPLOYMENT.replace("VRAM", "30GB"), "--filename: annotation headroom.gpu/vram: '30GB'"),
        ("kind: Service", "has no pod and no pod template. Example: kind: Pod"),
        ("a: [", "is not valid YAML: in "),
    ):
        file.write_text(text)
        rejected = run(server.debug, "score", "-f", str(file))
        assert (rejected.returncode, message in rejected.stderr) == (2, True), rejected.stderr
    missing = run(server.debug, "score", "-f", str(tmp_path / "none.yaml"))
    assert "none.yaml: No such file or directory" in missing.stderr
    both = run(server.debug, "score", "team-a/fits", "-f", str(file))
    assert "name either a pod or a manifest. Example: score -f pod.yaml" in both.stderr


def test_score_of_a_manifest_notes_misspelt_annotations_and_other_pods(
    server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(DEPLOYMENT.replace("vram: VRAM", "vrma: 9Gi") + f"---\n{DEPLOYMENT}")
    scored = run(server.debug, "score", "-f", str(file))
    assert "schedulerName" not in scored.stdout
    assert scored.stderr.splitlines() == [
        f"--filename: {file} has 2 pods; this is the score of the first, web",
        "--filename: annotation 'headroom.gpu/vrma' has no effect: Headroom does not read it; did "
        "you mean headroom.gpu/vram?",
        "--filename: annotation headroom.gpu/vram is missing, so the default of the namespace or "
        "the share of one replica counts. Example: headroom.gpu/vram: 8Gi",
    ]
    file.write_text(DEPLOYMENT.replace("VRAM", "9Gi"))
    assert run(server.debug, "score", "-f", str(file)).stderr == ""


def test_score_shows_the_record_of_a_past_decision(server: Server) -> None:
    shown = run(server.debug, "score", "team-a/large", "--decision", "last").stdout
    assert re.search(r"decided at \S+ \(uid-large\.\): 0 nodes could take the pod\n", shown)
    assert "3 nodes: insufficient GPU memory on any device" in shown
    unknown = run(server.debug, "score", "team-a/large", "--decision", "uid-fits.")
    assert (unknown.returncode, "no longer on record" in unknown.stderr) == (1, True)


def test_score_of_a_bound_pod_shows_its_node_and_how_to_see_why(server: Server) -> None:
    note = (
        "the pod is on node shared-0000; this ranking is computed now, as if the pod were not "
        "placed yet. To see why it is there: kubectl headroom score team-a/fits --decision last\n"
    )
    assert note in run(server.debug, "score", "team-a/fits").stdout
    assert f"  {note}" in run(server.debug, "score", "team-a/fits", "--node", "whole").stdout
    recorded = run(server.debug, "score", "team-a/fits", "--decision", "last").stdout
    assert "computed now" not in recorded
    both = run(server.debug, "score", "team-a/fits", "--decision", "last", "--node", "whole")
    assert "remove --node. Example: team-a/fits --decision last" in both.stderr


def test_score_says_which_terms_decide_between_two_nodes(server: Server) -> None:
    pair = ("--node", "shared-0000", "--against", "whole")
    shown = run(server.debug, "score", "team-a/fits", *pair).stdout
    assert re.search(r"^  \S+ wins over \S+ by \w+ \+\d\.\d\d", shown, re.MULTILINE)
    alone = run(server.debug, "score", "team-a/fits", "--against", "whole")
    assert (alone.returncode, "also name the other node" in alone.stderr) == (2, True)


def test_capacity_counts_pods_that_fit_and_shows_the_largest(server: Server) -> None:
    shown = run(server.debug, "capacity", "--vram", "20Gi").stdout
    # Each device except the unconfirmed pod's device can take one pod.
    assert shown.startswith("4 such pods fit now, on 3 of 3 nodes")
    assert re.search(r"^H100 +80.0 GiB +1 +1 +80.0 GiB$", shown, re.MULTILINE)
    bad = run(server.debug, "capacity", "--vram", "much")
    assert bad.returncode == 2
    assert "--vram: 'much' is not valid: it has no digits. Example: 8Gi" in bad.stderr


def test_top_sums_up_the_gpus_of_a_model(server: Server) -> None:
    shown = run(server.debug, "top", "model")
    header, l4, h100, *_ = [[cell.strip() for cell in row] for row in rows(shown.stdout)]
    assert header[:4] == ["MODEL", "GPUS", "RESERVED", "USED"]
    assert h100[:3] == ["H100", "1", "0.0 GiB"]
    assert l4[:3] == [
        "L4",
        "4",
        "7.0 GiB",
    ]  # The pod that reserved this memory could get either of two GPUs.
    wide = run(server.debug, "top", "model", "-o", "wide").stdout
    assert re.search(r"^L4 .* 96.0 GiB +0.0 GiB +16  ok$", wide, re.MULTILINE)
    rejected = run(server.debug, "top", "model", "--sort-by", "used")
    assert (rejected.returncode, "remove them" in rejected.stderr) == (2, True)


def test_top_sorts_and_selects_nodes(server: Server) -> None:
    def names(*options: str) -> list[str]:
        return [line.split()[0] for line in run(server.debug, "top", *options).stdout.splitlines()]

    assert names("--search", "shared-0001")[1:2] == ["shared-0001"]
    assert names()[1:4] == ["shared-0000", "shared-0001", "whole"]
    assert names("--sort-by", "headroom")[1:4] == ["shared-0000", "shared-0001", "whole"]
    nothing = run(server.debug, "top", "--troubled")
    assert (nothing.stdout, nothing.stderr) == ("", "no node matches\n")


@pytest.mark.parametrize(
    ("command", "note"),
    [
        pytest.param(
            "pending",
            "no pod in namespace ml waits for a GPU; -A shows pods of all namespaces\n",
            id="pending",
        ),
        pytest.param(
            "decisions",
            "no such decision is on record in namespace ml; -A shows all namespaces\n",
            id="decisions",
        ),
    ],
)
def test_pods_of_other_namespaces_are_not_listed(server: Server, command: str, note: str) -> None:
    other = run(server.debug, command, "-n", "ml")
    assert (other.stdout, other.stderr) == ("", note)


def test_decisions_are_listed_and_filtered(server: Server) -> None:
    shown = run(server.debug, "decisions", "--pod", "team-a/fits").stdout
    assert re.search(r"^\d+s +team-a +fits +shared-0000 +bound +-$", shown, re.MULTILINE)
    assert "large" not in shown
    rejected = run(server.debug, "decisions", "--pod", "team-a/large", "-o", "wide").stdout
    assert re.search(r" uid-large\S* +[\d.]+ ms .* 3 nodes: insufficient GPU memory ", rejected)
    assert re.search(r" large +- +rejected +\S+Z +0 of 3 ", rejected)
    named = run(server.debug, "decisions", "-n", "team-a", "--pod", "fits").stdout
    assert "fits" in named
    assert "large" not in named
    one = run(server.debug, "decisions", "-A", "--limit", "1")
    assert len(one.stdout.splitlines()) == 2
    assert one.stderr == "more are not shown: raise --limit. Example: --limit 1000\n"


def test_log_lists_changes_and_follows_them(server: Server) -> None:
    reserved = re.compile(r"reservation_made +team-a/fits +shared-0000 +bind: 7.0 GiB on each ")
    until(lambda: reserved.search(run(server.debug, "log").stdout), "the reservation is listed")
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
            reported = ""
            while "team-a/later" not in reported:
                assert process.poll() is None
                assert server.post("/filter", asked).status == 200
                reported = process.stdout.readline()
            assert "decision  team-a/later  -  rejected: none of 3 nodes" in reported
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def test_a_redacted_snapshot_contains_no_names(server: Server) -> None:
    whole = run(server.debug, "snapshot").stdout
    redacted = run(server.debug, "snapshot", "--redact").stdout
    assert json.loads(whole)["head"]["redacted"] is False
    assert json.loads(redacted)["head"]["redacted"] is True
    for name in ("team-a", '"large"', "shared-0000"):
        assert name in whole
        assert name not in redacted


def test_json_and_yaml_output_is_the_body_of_the_response(server: Server) -> None:
    answered = server.get("/v1/explain?pod=team-a/large").json()
    as_json = json.loads(run(server.debug, "why", "team-a/large", "-o", "json").stdout)
    as_yaml = yaml.safe_load(run(server.debug, "why", "team-a/large", "-o", "yaml").stdout)
    for body in (answered, as_json, as_yaml):
        del body["generated_at"]
    assert answered == as_json == as_yaml


def test_defaults_prints_a_valid_shell_script(server: Server) -> None:
    shown = run(server.debug, "defaults", "-A")
    assert "# team-a: the use of 1 pod is not measured" in shown.stdout.splitlines()
    subprocess.run(["sh", "-euc", shown.stdout], check=True)
    empty = run(server.debug, "defaults", "-n", "none")
    assert (empty.stdout, "-A shows pods of all namespaces" in empty.stderr) == ("", True)


def test_costs_are_shown_for_the_last_hour_but_not_for_a_range_without_prometheus(
    server: Server,
) -> None:
    shown = run(server.debug, "costs")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == "no pod held a GPU in this time\n"
    sheet = run(server.debug, "costs", "-o", "csv")
    assert sheet.stdout.startswith("namespace,held_gpu_hours,used_gpu_hours,idle_gpu_hours,")
    longer = run(server.debug, "costs", "--since", "30d")
    assert longer.returncode == 3
    assert "for a longer range set prometheus_url" in longer.stderr


def test_idle_reports_the_unchecked_devices(server: Server) -> None:
    shown = run(server.debug, "idle", "-A", "--hours", "2", "--held", "4Gi")
    assert shown.stdout == "not checked: 5 devices without a measurement of SM activity\n"
    assert shown.stderr == "no pod holds 4Gi or more and is idle for 2 h\n"
    sheet = run(server.debug, "idle", "-A", "-o", "csv", "--by", "namespace")
    assert (sheet.stdout, sheet.stderr) == ("namespace\n", "")
    wrong = run(server.debug, "idle", "-A", "--held", "much")
    assert (wrong.returncode, "held: 'much' is not a quantity" in wrong.stderr) == (2, True)


def test_headroom_has_the_same_commands(server: Server) -> None:
    own = run(server.debug, "drift", "-A").stdout
    assert own.splitlines()[1].split()[:4] == ["team-a", "fits", "shared-0000", "waiting"]
    environment = {"PATH": "/usr/bin:/bin", "HEADROOM_SERVER": server.debug}
    command = [sys.executable, "-m", "headroom", "drift", "-A"]
    also = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    assert also.stdout.decode() == own


def test_the_page_is_served_only_with_the_key_in_its_address(server: Server) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HEADROOM_SERVER": server.debug}
    command = [sys.executable, "-m", "headroom.plugin", "ui", "--no-browser"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Restore the handler, because a shell makes its background jobs ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0].decode()
            with urlopen(url, timeout=PATIENCE_S) as page:
                assert b"<title>Headroom</title>" in page.read()
            with urlopen(f"{url}v1/nodes", timeout=PATIENCE_S) as nodes:
                names = [node["name"] for node in json.load(nodes)["nodes"]]
            assert names == NODES
            without_key = "/".join(url.split("/")[:3])
            with pytest.raises(HTTPError) as rejected:
                urlopen(f"{without_key}/v1/nodes", timeout=PATIENCE_S)
            rejected.value.close()
            assert rejected.value.code == 404
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def test_an_unknown_pod_exits_with_1(server: Server) -> None:
    rejected = run(server.debug, "why", "team-a/unknown")
    assert rejected.returncode == 1
    assert rejected.stderr.startswith("kubectl headroom: pod team-a/unknown is not known: ")


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


def test_errors_name_the_option_instead_of_the_query_parameter(server: Server) -> None:
    bad = run(server.debug, "capacity", "--vram", "1Gi", "--gpus", "0")
    assert bad.returncode == 2
    assert bad.stderr.startswith("kubectl headroom: --gpus: ")
    assert bad.stderr.endswith("Example: --gpus 1\n")
