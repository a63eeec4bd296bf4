"""Tests the command line without a console: help, programs, errors and completion."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer
import yaml

from headroom.__main__ import COMMANDS, DEBUG_API_COMMANDS, unknown, usage
from headroom.__main__ import main as dispatch
from headroom.commands import app as extender_app
from headroom.kubectl.commands import app
from headroom.kubectl.help import EXPLAIN, FOLLOW, MAINTAIN, MEMORY, PLAN
from headroom.kubectl.word_order import in_order
from headroom.plugin import complete
from tests.answering import answering
from tests.kubectl.transcripts import run

OF_ALL = (*app.registered_commands, *extender_app.registered_commands)


def test_headroom_has_every_command_that_reads_the_debug_api() -> None:
    commands = {str(each.callback and each.callback.__name__) for each in app.registered_commands}
    assert commands - {"doctor", "plan"} == DEBUG_API_COMMANDS


def test_help_lists_every_command_in_its_group() -> None:
    shown = run("", "--help")
    assert shown.returncode == 0
    headings = [MEMORY, EXPLAIN, PLAN, MAINTAIN, FOLLOW]
    assert re.findall(r"^(\w[\w ]+):$", shown.stdout, re.MULTILINE) == ["Options", *headings]
    for heading in headings:
        group = shown.stdout.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        listed = re.findall(r"^  (\S+)  ", group, re.MULTILINE)
        assert {name for name in COMMANDS[heading] if name != "replay"} == set(listed)
    assert "Exit status: 0: answered; 1: " in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_help_of_headroom_lists_the_commands_of_all_programs() -> None:
    names = {str(each.name or (each.callback and each.callback.__name__)) for each in OF_ALL}
    listed = re.findall(r"^  (\S+) +\w", usage(), re.MULTILINE)[1:]  # without the description
    programs = {name.replace("_", "-") for name in names} | {"config", "agent", "gate"}
    assert sorted(listed) == sorted(programs)
    assert max(map(len, usage().splitlines())) <= 80
    assert unknown("tpo") == "there is no command 'tpo'. Did you mean top?"
    assert unknown("xyz") == "there is no command 'xyz'. To list all: headroom --help"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 0, "Usage: headroom COMMAND"),
        (["--help"], 0, "Usage: headroom COMMAND"),
        (["tpo"], 2, "headroom: there is no command 'tpo'."),
        (["gate", "--help"], 2, "headroom: gate takes no arguments."),
        (["--server", "http://127.0.0.1:1", "top"], 3, "headroom: http://127.0.0.1:1 does not"),
    ],
)
def test_headroom_starts_the_command_of_each_program(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(sys, "argv", ["headroom", *arguments]):
        try:
            returned = dispatch()
        except SystemExit as err:
            returned = int(err.code or 0)
    assert returned == status
    assert text in "".join(capsys.readouterr())


def test_an_invalid_subject_of_top_is_rejected_with_the_valid_ones() -> None:
    rejected = run("", "top", "namespaces")
    assert rejected.returncode == 2
    assert "'namespaces' is not one of node, gpu, pod, model. Example: top gpu" in rejected.stderr


def test_an_unreachable_address_exits_with_3() -> None:
    rejected = run("http://127.0.0.1:1", "top")
    assert rejected.returncode == 3
    assert rejected.stderr.startswith("kubectl headroom: http://127.0.0.1:1 does not answer: ")
    assert rejected.stderr.endswith("; check --server or HEADROOM_SERVER\n")
    bad = run("127.0.0.1:8889", "top")
    assert bad.returncode == 2
    assert "Example: http://127.0.0.1:8889" in bad.stderr


def test_a_missing_kubeconfig_has_its_own_message() -> None:
    rejected = run("", "top")
    assert rejected.returncode == 3
    (line,) = rejected.stderr.splitlines()
    assert line.startswith("kubectl headroom: no cluster is configured: ")
    assert "--server http://127.0.0.1:8889" in line


@pytest.mark.parametrize("content", ["broken: [", "- a list", "\xff"])
@pytest.mark.parametrize("command", ["top", "doctor"])
def test_a_file_that_is_not_a_kubeconfig_is_reported(
    content: str, command: str, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(content, "latin-1")
    rejected = run("", "--kubeconfig", str(kubeconfig), command)
    assert rejected.returncode in (2, 3)
    (line,) = rejected.stderr.splitlines()
    assert f"no cluster is configured: {kubeconfig}: " in line
    assert ".;" not in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["top", "--context"], "Option '--context' requires an argument."),
        (["-n", "team-a", "cordon", "gpu-a", "0"], "No such option: -n"),
        (["top", "-n"], "Option '-n' requires an argument."),
        (["top", "--serch", "x"], "No such option: --serch (Possible options: --search)"),
        (
            ["capacity", "20Gi"],
            "Missing option '--vram'. Example: kubectl headroom capacity --vram 20Gi",
        ),
        (
            ["cordon", "gpu-a"],
            "Missing argument 'GPU'. Example: kubectl headroom cordon gpu-2 0",
        ),
        (
            ["idle", "--by", "team"],
            "Invalid value for '--by': 'team' is not one of 'pod', 'owner', 'namespace'.",
        ),
    ],
)
def test_errors_of_the_command_line_show_the_correct_usage(arguments: list[str], text: str) -> None:
    rejected = run("", *arguments)
    assert rejected.returncode == 2
    assert rejected.stderr.splitlines()[-1] == f"Error: {text}"


@pytest.mark.parametrize(
    ("typed", "ordered"),
    [
        ("top --context prod", "--context prod top"),
        ("-n ml why x", "why -n ml x"),
        ("-nml --context=prod why x", "--context=prod why -nml x"),
        ("-A -o wide top pod", "top -A -o wide pod"),
        ("-Aowide top pod", "top -Aowide pod"),
        ("top --search --context node", "top --search --context node"),
        ("top node --server x --watch --token y", "--server x --token y top node --watch"),
        ("score -f pod.yaml --context prod", "--context prod score -f pod.yaml"),
        ("-f x score", "-f x score"),  # a flag of log
        ("top -- --context prod", "top -- --context prod"),
        ("top --context", "top --context"),
        ("--context", "--context"),
        ("ui --no-browser --context prod", "--context prod ui --no-browser"),
        ("plan record --context prod", "plan record --context prod"),
        ("doctor --kubeconfig k", "--kubeconfig k doctor"),
        ("help", "--help"),
        ("help top", "top --help"),
        ("--context prod help top", "--context prod top --help"),
        ("tpo -n x", "tpo -n x"),
        ("--tpo top", "--tpo top"),
        ("", ""),
    ],
)
def test_options_are_accepted_before_and_after_the_command(typed: str, ordered: str) -> None:
    assert in_order(typed.split(), typer.main.get_command(app)) == ordered.split()


def test_an_option_overrides_the_variable_which_is_named(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("{kind: Config, apiVersion: v1, contexts: [], current-context: ''}")
    flags = ("--context", "nix"), ("--kubeconfig", str(kubeconfig)), ("--kubeconfig", "/missing")
    with answering(lambda _: (200, b'{"nodes": [], "continue": null}', {})) as url:
        for flag in flags:
            for words in (("top", *flag), (*flag, "top")):
                rejected = run("", *words, variable=url)
                assert rejected.returncode in (2, 3)
                assert "kubeconfig" in rejected.stderr
                assert url not in rejected.stderr
        named = f"server: {url} (HEADROOM_SERVER)\n"
        assert run("", "top", variable=url).stderr.startswith(named)
        assert named not in run(url, "top", variable="http://127.0.0.1:1").stderr
        assert named not in run("", "top", "--help", variable=url).stderr


def test_help_is_also_a_command() -> None:
    assert run("", "help") == run("", "--help")
    assert run("", "help", "top") == run("", "top", "--help")


def test_an_unknown_context_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    contexts = [{"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("b", "a")]
    clusters = [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]
    content = {"kind": "Config", "apiVersion": "v1", "contexts": contexts, "clusters": clusters}
    content |= {"users": [{"name": "u", "user": {}}], "current-context": "a"}
    kubeconfig.write_text(yaml.safe_dump(content))
    rejected = run("", "--kubeconfig", str(kubeconfig), "--context", "nix", "top")
    assert rejected.returncode == 2
    assert rejected.stderr == (
        "kubectl headroom: --context: the kubeconfig has no context 'nix'. It has: a, b\n"
    )


def test_a_server_that_is_not_headroom_is_reported_with_its_response() -> None:
    with answering(lambda _: (418, b"I'm a teapot", {"Content-Type": "text/html"})) as url:
        rejected = run(url, "top")
    assert rejected.returncode == 3
    assert rejected.stderr == (
        f"kubectl headroom: {url} is not a debug API of Headroom: /v1/nodes returned 418 without "
        "JSON; check --server or HEADROOM_SERVER\n"
    )


def test_the_doctor_is_a_command_of_the_plugin(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "nodes: [{name: a, gpus: 1, memory: 1Gi, annotations: {headroom.gpu/reserve: x}}]"
    )
    reported = run("", "doctor", "--fleet", str(fleet))
    assert reported.stdout.startswith("warning: a: takes no pods: annotation headroom.gpu/reserve")
    assert reported.returncode == 1
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
    where = ["--kubeconfig", str(kubeconfig), "--context", "unknown-context"]
    reported = run("", *where, "doctor") if before else run("", "doctor", *where)
    assert reported.returncode == 2
    assert "unknown-context" in reported.stderr


def test_the_plan_is_a_command_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("", "plan", "--help")
    assert shown.returncode == 0
    assert "--prometheus" in shown.stdout
    assert "kubeconfig" in run("", "plan", "record", "--help").stdout
    rejected = run("", "plan", "--pods", "pods.csv")
    assert rejected.returncode == 2
    assert rejected.stderr.startswith(
        "headroom: --pods pods.csv also needs a CSV file of the nodes. Ex"
    )
    # The client package does not contain the planner.
    monkeypatch.setitem(sys.modules, "headroom.planner.command", None)
    missing = run("", "plan", "--help")
    assert missing.returncode == 2
    assert missing.stderr.endswith("Install it: pip install 'headroom-gpu[extender]'\n")


def test_version_is_printed() -> None:
    shown = run("", "--version")
    assert shown.returncode == 0
    assert shown.stdout.startswith("kubectl headroom: ")


def offered(*words: str) -> list[str]:
    """Return the completions that kubectl would get for the words after `headroom`."""
    message = io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["kubectl_complete-headroom", *words]),
        contextlib.redirect_stdout(message),
    ):
        complete()
    *lines, directive = message.getvalue().splitlines()
    assert directive == ":4"
    return [line.partition("\t")[0] for line in lines]


def test_kubectl_gets_completions() -> None:
    assert {"top", "why", "doctor"} <= set(offered(""))
    assert offered("do") == ["doctor"]
    assert offered("top", "") == ["node", "gpu", "pod", "model"]
    assert offered("top", "-o", "js") == ["json", "jsonpath="]
    assert offered("top", "--no-h") == []
    assert offered("--no-h") == ["--no-headers"]
    assert offered("doctor", "--sch") == ["--scheduler-config"]
    assert offered("--context", "it's one", "cap") == ["capacity"]
    assert offered("who") == []
    assert offered() == offered("")
