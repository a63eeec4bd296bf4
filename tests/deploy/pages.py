"""The commands of docs pages, with the output that each page shows.

Comments mark parts of a page: ``<!-- NAME -->`` and ``<!-- end of NAME -->``. A test executes a
part by ``play("get-started/helm.md", "install", ...)``. tests/deploy/test_get_started.py searches
for these calls, so both names must be literals.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.controlplane import ROOT, built

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
#: Patterns of text that differs between runs, and the text that replaces it in both outputs.
_VARIABLE = (
    (re.compile(r"-[a-f0-9]{8,10}-[a-z0-9]{5}\b"), "-HASH"),  # A pod of a Deployment.
    (re.compile(r"(headroom-agent)-[a-z0-9]{5}\b"), r"\1-HASH"),
    # A node of the tests, because kube-scheduler chooses at random between nodes with equal scores.
    (re.compile(r"\bgpu-[\da-z]\b"), "gpu-N"),
    # On a busy machine probes fail, and the kubelet restarts containers.
    (re.compile(r"(\d/\d +\w+ +)\d+( \(\w+ ago\))?"), r"\1RESTARTS"),
    (re.compile(r"\b\d+[smhd](\d+[smh])?(?=\s|$)"), "AGE"),
    (re.compile(r" +"), " "),  # Columns are as wide as their longest value.
    (re.compile(r" +$", re.MULTILINE), ""),
)

#: Executes shell commands. Returns their stdout and exit status.
Run = Callable[[str], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """A code block, without its indentation."""

    language: str
    text: str
    #: The name of the marks around it, or empty.
    mark: str


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    #: The output that the page shows, or None.
    output: str | None = None


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return all code blocks of a page, in order."""
    text = read(page)
    parts = [
        (found.start(), found.end(), found[1])
        for found in re.finditer(r"<!-- ([\w -]+) -->.*?<!-- end of \1 -->", text, re.DOTALL)
    ]
    return [
        Block(
            found[2],
            textwrap.dedent(found[3]),
            next((mark for begin, end, mark in parts if begin < found.start() < end), ""),
        )
        for found in _FENCE.finditer(text)
    ]


def blocks_of(page: str, mark: str) -> list[Block]:
    """Return the blocks of a marked part."""
    found = [block for block in blocks(page) if block.mark == mark]
    assert found, f"docs/{page} has no part {mark}"
    return found


def commands(page: str, mark: str) -> list[str]:
    """Return the shell blocks of a marked part, as a reader enters them."""
    return [block.text for block in blocks_of(page, mark) if block.language == "sh"]


def steps(block: Block) -> Iterator[Step]:
    """Yield the commands of a block: each line after a prompt, or the whole block.

    A file is written if its block begins with a comment that is its name.
    """
    if block.language == "sh":
        yield Step(block.text)
    elif block.language == "console":
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Step(command, output)
    elif name := re.match(r"# (\S+\.yaml)\n", block.text):
        yield Step(f"cat > {name[1]} <<'END OF FILE'\n{block.text}END OF FILE")


def matches(output: str, shown: str) -> bool:
    """Return whether an output matches the output on a page.

    ``...`` stands for any text, and as a whole line for any lines. Generated pod names, node names,
    ages and the width of columns may differ.
    """
    for pattern, instead in _VARIABLE:
        output, shown = pattern.sub(instead, output), pattern.sub(instead, shown)
    wanted = re.escape("\n" + shown.strip("\n")).replace(r"\.\.\.", "...")
    wanted = re.sub(r"\\\n\.\.\.(?=\\\n|$)", r"(\n.*)?", wanted).replace("...", ".*")
    return re.fullmatch(wanted, "\n" + output.strip("\n"), re.DOTALL) is not None


def play(page: str, mark: str, run: Run, words: Mapping[str, str] | None = None) -> None:
    """Execute the commands of a marked part in order, and compare their outputs.

    ``words`` replaces words on the page, such as NODE, in commands and outputs.
    """
    for step in [step for block in blocks_of(page, mark) for step in steps(block)]:
        command, shown = _with(words, step.command), _with(words, step.output)
        output, status = run(command)
        assert status == 0, f"docs/{page}, exit status {status}:\n$ {command}\n{output}"
        if step.output is not None and not matches(output, shown):
            raise AssertionError(f"docs/{page}:\n$ {command}\n{output}\nthe page shows:\n{shown}")


def _with(words: Mapping[str, str] | None, text: str | None) -> str:
    """Return the text with all words replaced at once."""
    if not words:
        return text or ""
    pattern = rf"\b({'|'.join(map(re.escape, words))})\b"
    return re.sub(pattern, lambda found: words[found[1]], text or "")


def tools(folder: Path, *names: str) -> Path:
    """Return a folder for the PATH of a shell, with these programs and the kubectl plugin."""
    programs = folder / "bin"
    if not programs.exists():
        programs.mkdir()
        for name in names:
            (programs / name).symlink_to(built(name)[name])
        plugin = programs / "kubectl-headroom"
        python = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)}"
        plugin.write_text(f'#!/bin/sh\n{python} -m headroom.plugin "$@"\n')
        plugin.chmod(0o755)
    return programs


def shell(folder: Path, kubeconfig: Path, work: Path = ROOT, **more: str) -> Run:
    """Return a shell in the folder ``work``, with helm and kubectl for a cluster.

    ``folder`` keeps the tools, and is the home directory. ``more`` are further variables. After a
    failed command, its output includes stderr.
    """
    environment = {
        "PATH": f"{tools(folder, 'kubectl', 'helm')}:{os.environ['PATH']}",
        "HOME": str(folder),
        "KUBECONFIG": str(kubeconfig),
        "GOGC": os.environ.get("GOGC", "100"),
        **more,
    }

    def run(script: str) -> tuple[str, int]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return done.stdout + (done.stderr if done.returncode else ""), done.returncode

    return run
