"""A shell in which a test enters commands one after another, as a person does."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4


class Terminal:
    """A shell that keeps variables, functions and the folder between commands."""

    def __init__(self, shell: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._shell = subprocess.Popen(
            shell,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._shell.pid

    def enter(self, command: str) -> tuple[str, int]:
        """Run a command. Return its output and its exit status."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        end = uuid4().hex
        # Redirect stdin, because a command that reads from the terminal would read the next
        # commands.
        self._shell.stdin.write(f"{{ {command}\n}} < /dev/null\necho {end} $?\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        while end not in (line := self._shell.stdout.readline()):
            assert line, f"the shell has ended: {command}\n{''.join(lines)}"
            lines.append(line)
        before, _, status = line.partition(f"{end} ")
        return "".join([*lines, before]), int(status)

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()
