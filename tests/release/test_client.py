"""Checks that `pip install headroom-gpu` installs a client whose commands need no server
packages.
"""

import os
import re
import statistics
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main
import yaml

from headroom.__main__ import DEBUG_API_COMMANDS, EXTENDER_COMMANDS
from headroom.commands import app as extender_app
from headroom.not_installed import missing
from release.source import Source
from tests.controlplane import ROOT
from tests.release.conftest import Packages, locked
from tests.serving import serving
from tests.waiting import PATIENCE_S

FLEET = "nodes: [{name: gpu-a, gpus: 2, memory: 24Gi, model: L4}]\n"
#: Packages that the client must not install: one package of each extra, and one of the tests.
NOT_OF_THE_CLIENT = {"fastapi", "grpcio", "msgspec", "numpy", "prometheus-client", "pytest"}
#: Modules that commands must not import at their start, because the import takes long.
SLOW = ("kubernetes", "rich", "yaml")


def run(client: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [client / "bin" / command[0], *command[1:]],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_locks_of_client_and_agent_are_small() -> None:
    assert not NOT_OF_THE_CLIENT & locked("client")
    assert not {"typer", "rich", "fastapi"} & locked("agent")
    assert locked("client") <= locked("extender")


def test_only_commands_of_the_extender_need_more_packages() -> None:
    group = typer.main.get_command(extender_app)
    assert set(group.commands) == EXTENDER_COMMANDS  # type: ignore[attr-defined]


#: A program that prints the help of each command in its own process. It forks the processes after
#: the common imports.
HELP = """
import os, sys
from headroom.plugin import main
for command in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = ["kubectl-headroom", command, "--help"]
        main()
    assert os.wait()[1] == 0, command
"""


@pytest.mark.slow
def test_every_command_of_the_client_has_help(client: Path) -> None:
    commands = sorted(DEBUG_API_COMMANDS)
    helped = run(client, "python", "-c", HELP, *commands)
    assert (helped.returncode, helped.stderr) == (0, "")
    used = re.findall(r"Usage: kubectl headroom (\S+)", helped.stdout)
    assert used == commands
    assert run(client, "kubectl-headroom", "doctor", "--help").returncode == 0
    helped = run(client, "headroom", "--help")
    assert helped.returncode == 0
    for command in DEBUG_API_COMMANDS:
        assert f"\n  {command} " in helped.stdout
    assert "pip install 'headroom-gpu[extender]'" in helped.stdout
    assert "Usage: headroom why" in run(client, "headroom", "why", "--help").stdout


@pytest.mark.slow
def test_a_client_command_prints_the_data_of_a_server(client: Path) -> None:
    with serving(FLEET) as server:
        shown = run(client, "kubectl-headroom", "--server", server.debug, "top")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.splitlines()[1].split()[:4] == ["gpu-a", "2", "0.0", "GiB"]
        also = run(client, "headroom", "--server", server.debug, "top", "-o", "yaml")
        assert [node["name"] for node in yaml.safe_load(also.stdout)["nodes"]] == ["gpu-a"]


@pytest.mark.slow
def test_without_a_cluster_the_client_reports_the_missing_cluster(client: Path) -> None:
    rejected = run(client, "kubectl-headroom", "top")
    assert rejected.returncode == 3
    assert "no cluster is configured" in rejected.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        pytest.param(["headroom", "doctor"], "extender", id="doctor"),
        pytest.param(["kubectl-headroom", "doctor"], "extender", id="doctor of the plugin"),
    ],
)
def test_a_server_command_reports_the_extra_that_it_needs(
    client: Path, command: list[str], extra: str
) -> None:
    rejected = run(client, *command)
    assert rejected.returncode == 2
    (line,) = rejected.stderr.splitlines()
    assert f"install it: pip install 'headroom-gpu[{extra}]'" in line


@pytest.mark.slow
@pytest.mark.parametrize("command", [["agent", "--once"], ["gate"]])
def test_the_published_package_has_no_agent_and_reports_where_it_is(
    client: Path, command: list[str]
) -> None:
    rejected = run(client, "headroom", *command)
    assert (rejected.returncode, rejected.stderr) == (
        2,
        "headroom: the agent is not installed here. It is in the image headroom-agent; or clone "
        "the repository, and run there: python -m agent --once\n",
    )


@pytest.mark.parametrize("name", ["agent", "extender"])
def test_a_missing_program_is_reported_with_its_image(name: str) -> None:
    message = missing(ModuleNotFoundError(f"No module named {name!r}", name=name), "extender")
    assert message.startswith(
        f"the {name} is not installed here. It is in the image headroom-{name};"
    )


@pytest.mark.slow
def test_the_wheel_contains_only_the_package_headroom(packages: Packages) -> None:
    with zipfile.ZipFile(packages.wheel) as wheel:
        folders = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"headroom"}


@pytest.mark.slow
def test_the_installed_package_reports_its_version(client: Path, source: Source) -> None:
    assert run(client, "headroom", "--version").stdout == f"headroom {source.version}\n"
    plugin = run(client, "kubectl-headroom", "--version")
    assert plugin.stdout == f"kubectl headroom: {source.version}\n"
    printed = run(
        client, "python", "-c", "from headroom.version import own_version as v; print(v())"
    )
    assert printed.stdout == f"{source.version}\n"


@pytest.mark.slow
def test_a_command_starts_without_slow_imports(
    client: Path, record_property: Callable[[str, object], None]
) -> None:
    code = (
        "import sys; sys.argv = ['kubectl-headroom', 'top', '--help']\n"
        "from headroom.plugin import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    imported = set(run(client, "python", "-c", code).stderr.split())
    assert "typer" in imported
    assert not {*SLOW, "numpy", "pydantic_settings"} & imported

    def cpu_s(*command: str) -> float:
        before = os.times()
        assert run(client, *command).returncode == 0
        after = os.times()
        used = after.children_user - before.children_user
        return used + after.children_system - before.children_system

    runs = [
        (cpu_s("kubectl-headroom", "top", "--help"), cpu_s("python", "-c", "pass"))
        for _ in range(3)
    ]
    command_s, nothing_s = (statistics.median(each) for each in zip(*runs, strict=True))
    # Add a tick, because the kernel counts CPU in ticks of 10 ms, and an empty program can take
    # less than a tick.
    record_property(
        "measured",
        f"kubectl headroom top --help: {command_s:.2f} s of CPU, python -c pass: {nothing_s:.2f} s",
    )


def test_the_guide_mentions_only_existing_extras() -> None:
    text = (ROOT / "docs/reference/kubectl.md").read_text()
    assert "`pip install headroom-gpu`" in text
    assert "headroom-gpu[extender,cluster]" not in text
