"""docs/get-started/local-cluster.md, entered literally into a shell, to its last line."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from extender.config.fleet_file import load_fleet
from tests.controlplane import ROOT
from tests.debian import ip
from tests.waiting import until

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/get-started/local-cluster.md").read_text(encoding="utf-8")
#: (language, text) of each code block, in order.
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SERVE = ".venv/bin/python -m extender serve"


class Terminal:
    """A shell in the repository, in a network namespace of its own: ports of the machine, which may
    be in use, do not matter."""

    def __init__(self) -> None:
        settings = ("http_proxy", "https_proxy", "all_proxy", "KUBECONFIG")
        environment = {k: v for k, v in os.environ.items() if k.lower() not in settings}
        environment["HOME"] = "/nonexistent"
        self._shell = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "bash", "--norc"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.enter(f"{' '.join(ip())} link set lo up") == ("", 0)

    def enter(self, command: str) -> tuple[str, int]:
        """Return the output of a command, with its exit status."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        end = uuid4().hex
        # A command that reads from the terminal would read the next ones.
        self._shell.stdin.write(f"{{ {command}\n}} < /dev/null\necho {end} $?\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        while end not in (line := self._shell.stdout.readline()):
            assert line, f"the shell has ended: {command}\n{''.join(lines)}"
            lines.append(line)
        before, _, status = line.partition(f"{end} ")
        return "".join([*lines, before]), int(status)

    def serves(self) -> bool:
        return self.enter("curl -s -o /dev/null localhost:8889/readyz")[1] == 0

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    #: The documented output; None if the page shows none.
    output: str | None = None


def steps(language: str, text: str) -> Iterator[Step]:
    """Yield the commands of a block: each line after a prompt, or the whole block."""
    if language == "sh":
        yield Step(text)
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Step(command, output)


def matches(output: str, documented: str) -> bool:
    """Return whether the output is as documented, where ``...`` stands for any text."""
    parts = map(re.escape, documented.rstrip("\n").split("..."))
    return re.fullmatch(".*".join(parts), output.rstrip("\n"), re.DOTALL) is not None


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    try:
        yield opened
    finally:
        opened.close()


def test_the_page_has_a_server_and_commands_for_it() -> None:
    assert [language for language, _ in BLOCKS].count("console") == 7
    assert BLOCKS[0] == ("sh", f"{SERVE} --embedded docs/get-started/fleet.example.yaml\n")


def test_the_fleet_file_of_the_page_is_valid(tmp_path: Path) -> None:
    ((_, text),) = [block for block in BLOCKS if block[0] == "yaml"]
    (tmp_path / "fleet.yaml").write_text(text)
    (nodes,) = load_fleet(tmp_path / "fleet.yaml").nodes
    assert (nodes.name, nodes.gpus, nodes.replicas) == ("gpu-a", 2, 4)


def test_every_command_of_the_page_works_in_order(terminal: Terminal, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    for language, text in BLOCKS:
        if language == "yaml":
            continue
        for step in steps(language, text):
            if step.command.startswith(SERVE):
                terminal.enter(f"{step.command.strip()} > {log} 2>&1 &")
                until(terminal.serves, "the server answers", every_s=0.2, logs=log.read_text)
                continue
            output, status = terminal.enter(step.command)
            assert status == 0, f"$ {step.command}\n{output}"
            if step.output is not None:
                shown = f"$ {step.command}\n{output}\ndocumented:\n{step.output}"
                assert matches(output, step.output), shown
