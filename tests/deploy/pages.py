"""Reads the commands of docs pages, executes them, and compares the output with the page.

The comments ``<!-- NAME -->`` and ``<!-- end of NAME -->`` mark a part of a page. A test executes a
part by calling ``play("get-started/helm.md", "install", ...)``. Both names must be literals,
because tests/deploy/test_get_started.py searches for these calls.
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
#: Patterns of text that differs between runs, and the text that replaces them before outputs are
#: compared.
_VARIABLE = (
    (
        re.compile(r"-[a-f0-9]{8,10}-[a-z0-9]{5}\b"),
        "-HASH",
    ),  # the generated name of a Deployment's pod
    (re.compile(r"(headroom-agent)-[a-z0-9]{5}\b"), r"\1-HASH"),
    # Ignore node names, because kube-scheduler chooses at random between nodes with equal scores.
    (re.compile(r"\bgpu-[\da-z]\b"), "gpu-N"),
    # Ignore restarts, because on a busy machine probes fail and the kubelet restarts containers.
    (re.compile(r"(\d/\d +\w+ +)\d+( \(\w+ ago\))?"), r"\1RESTARTS"),
    (re.compile(r"\b\d+[smhd](\d+[smh])?(?=\s|$)"), "AGE"),
    (re.compile(r" +"), " "),  # A column is as wide as its longest value.
    (re.compile(r" +$", re.MULTILINE), ""),
)

#: A function that executes shell commands and returns their stdout and exit status.
Run = Callable[[str], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page, without its indentation."""

    language: str
    text: str
    #: The name of the marked part that contains the block, or an empty string.
    mark: str


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    #: The output that the page shows for the command, or None.
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
    """Return the code blocks of a marked part."""
    found = [block for block in blocks(page) if block.mark == mark]
    assert found, f"docs/{page} has no part {mark}"
    return found


def commands(page: str, mark: str) -> list[str]:
    """Return the shell commands of a marked part, as a reader enters them."""
    return [block.text for block in blocks_of(page, mark) if block.language == "sh"]


def steps(block: Block) -> Iterator[Step]:
    """Yield the commands of a block. If the block has prompts, each line after a prompt is a
    command. Otherwise, the block is one command.

    If a block begins with a comment that is a file name, the command writes the block to the file.
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

    ``...`` matches any text, and as a complete line, it matches any lines. Generated pod names,
    node names, ages and the width of columns may differ.
    """
    for pattern, instead in _VARIABLE:
        output, shown = pattern.sub(instead, output), pattern.sub(instead, shown)
    wanted = re.escape("\n" + shown.strip("\n")).replace(r"\.\.\.", "...")
    wanted = re.sub(r"\\\n\.\.\.(?=\\\n|$)", r"(\n.*)?", wanted).replace("...", ".*")
    return re.fullmatch(wanted, "\n" + output.strip("\n"), re.DOTALL) is not None


def play(page: str, mark: str, run: Run, words: Mapping[str, str] | None = None) -> None:
    """Execute the commands of a marked part in order, and compare their outputs with the page.

    ``words`` maps placeholders such as NODE to values for commands and outputs.
    """
    for step in [step for block in blocks_of(page, mark) for step in steps(block)]:
        command, shown = _with(words, step.command), _with(words, step.output)
        output, status = run(command)
        assert status == 0, f"docs/{page}, exit status {status}:\n$ {command}\n{output}"
        if step.output is not None and not matches(output, shown):
            raise AssertionError(f"docs/{page}:\n$ {command}\n{output}\nthe page shows:\n{shown}")


def _with(words: Mapping[str, str] | None, text: str | None) -> str:
    """Replace all words in the text in one pass."""
    if not words:
        return text or ""
    pattern = rf"\b({'|'.join(map(re.escape, words))})\b"
    return re.sub(pattern, lambda found: words[found[1]], text or "")


def tools(folder: Path, *names: str) -> Path:
    """Return a folder with these programs and the kubectl plugin, for the PATH of a shell."""
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
    """Return a function that runs shell commands in the folder ``work``, with helm and kubectl for
    a cluster.

    ``folder`` is the home directory and contains the tools. ``more`` are further environment
    variables. If a command fails, its output includes stderr.
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
