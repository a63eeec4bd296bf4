"""Enters the commands of docs/how-to/own-nodes.md into a shell, up to its last line."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom.runtime.settings.fleet_file import load_fleet
from tests.controlplane import ROOT
from tests.debian import ip
from tests.deploy.pages import blocks, matches, play, steps
from tests.deploy.terminal import Terminal
from tests.waiting import until

pytestmark = pytest.mark.slow

#: Each command prints this line on stderr, because its server comes from the variable.
SERVER = "server: http://localhost:8889 (HEADROOM_SERVER)\n"
BLOCKS = blocks("how-to/own-nodes.md")
SERVE = ".venv/bin/python -m headroom serve"


class Isolated(Terminal):
    """A shell in its own network namespace, so that ports in use on the machine do not matter."""

    def __init__(self) -> None:
        settings = ("http_proxy", "https_proxy", "all_proxy", "KUBECONFIG")
        environment = {k: v for k, v in os.environ.items() if k.lower() not in settings}
        shell = "unshare", "--net", "--pid", "--fork", "--kill-child", "bash", "--norc"
        super().__init__(shell, ROOT, {**environment, "HOME": "/nonexistent"})
        assert self.enter(f"{' '.join(ip())} link set lo up") == ("", 0)

    def serves(self) -> bool:
        return self.enter("curl -s -o /dev/null localhost:8889/readyz")[1] == 0


@pytest.fixture
def terminal() -> Iterator[Isolated]:
    opened = Isolated()
    try:
        yield opened
    finally:
        opened.close()


def test_the_page_has_a_server_and_commands_for_it() -> None:
    assert [block.language for block in BLOCKS].count("console") == 6
    assert BLOCKS[0].text == f"{SERVE} --embedded docs/how-to/fleet.example.yaml\n"


def test_the_fleet_file_of_the_page_is_valid(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "yaml"]
    (tmp_path / "fleet.yaml").write_text(block.text)
    (nodes,) = load_fleet(tmp_path / "fleet.yaml").nodes
    assert (nodes.name, nodes.gpus, nodes.replicas) == ("gpu-a", 2, 4)


def test_every_command_of_the_page_works_in_order(terminal: Isolated, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    for step in [step for block in BLOCKS for step in steps(block)]:
        if step.command.startswith(SERVE):
            terminal.enter(f"{step.command.strip()} > {log} 2>&1 &")
            until(terminal.serves, "the server answers", every_s=0.2, logs=log.read_text)
            continue
        output, status = terminal.enter(step.command)
        assert status == 0, f"$ {step.command}\n{output}"
        if step.command.startswith("headroom "):
            assert output.startswith(SERVER), output  # The page mentions this line once.
            output = output.removeprefix(SERVER)
        if step.output is not None:
            shown = f"$ {step.command}\n{output}\ndocumented:\n{step.output}"
            assert matches(output, step.output), shown


def test_the_repository_is_cloned_into_the_folder_of_the_page(tmp_path: Path) -> None:
    def run(command: str) -> tuple[str, int]:
        done = subprocess.run(
            ["bash", "-euc", f"{command}\ntest -f Makefile"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr, done.returncode

    play("get-started/local-cluster.md", "clone", run, {"REPOSITORY": str(ROOT)})
    assert (tmp_path / "headroom/docs/get-started/local-cluster.md").exists()
