"""Prints answers of the debug API as JSON, YAML, or text that fits the terminal."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headroom.contract.printable import printable, printable_json, printable_lines
from headroom.kubectl.debug_api_client import BAD_INPUT, CommandError
from headroom.kubectl.table import Style, Table, laid_out, wrapped

#: Whether tables have headers and totals.
HEADERS = ContextVar("HEADERS", default=True)
_CODES: dict[Style, str] = {"bold": "\x1b[1m", "red": "\x1b[31m"}


class Output(Enum):
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class JsonPath:
    """An output format of kubectl, such as jsonpath={.nodes[*].name}, which kubectl evaluates."""

    value: str


class Sheet(Enum):
    """Output formats of a command whose table a spreadsheet can read."""

    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def show(text: str, *, error: bool = False) -> None:
    """Print a line immediately, without unprintable characters. Commands print all their text here.

    If ``error`` is true, print it on stderr.
    """
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)


def show_json(body: Any, indent: int | None = None) -> None:
    """Print a JSON document. Unprintable characters are escaped."""
    print(printable_json(json.dumps(body, indent=indent)))  # noqa: T201


def print_data(body: Any, output: Enum | JsonPath | None) -> bool:
    """Print the body if the output is JSON, YAML or a JSONPath. Return whether it was printed."""
    if isinstance(output, JsonPath):
        print(printable_lines(_evaluated(body, output)), end="")  # noqa: T201
        return True
    match output and output.value:
        case "json":
            show_json(body, indent=2)
        case "yaml":
            import yaml  # slow to import

            print(yaml.safe_dump(body, sort_keys=False), end="")  # noqa: T201
        case _:
            return False
    return True


def _evaluated(body: Any, output: JsonPath) -> str:
    """Return what kubectl prints for the body. Raises ``CommandError``."""
    # With --local, kubectl contacts no API server and accepts every kind. The patch is empty.
    command = ["kubectl", "patch", "--local", "--type=merge", "--patch={}", "--filename=-"]
    whole = {
        "apiVersion": "headroom.gpu/v1",
        "kind": "Answer",
        "metadata": {"name": "answer"},
        **body,
    }
    try:
        done = subprocess.run(
            [*command, f"--output={output.value}"],
            input=json.dumps(whole),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as err:
        raise CommandError(f"-o {output.value} needs kubectl: {err}", BAD_INPUT) from err
    if done.returncode:
        why = done.stderr.strip().removeprefix("error: ")
        raise CommandError(f"-o {output.value}: {why}", BAD_INPUT)
    return done.stdout


def show_table(body: Any, table: Table, output: Output | JsonPath | None, empty: str) -> None:
    """Print the table, its names, or the body if the output is JSON, YAML or a JSONPath.

    ``empty`` is printed on stderr if the table has no rows.
    """
    if print_data(body, output):
        return
    if output is Output.NAME:
        for name in table.resources():
            show(name)
        return
    if not table.rows:
        show(empty, error=True)
        return
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for style, line in laid_out(table, terminal_width(), headers=HEADERS.get()):
        code = _CODES.get(style, "") if coloured else ""
        text = printable(line)
        print(f"{code}{text}\x1b[0m" if code else text)  # noqa: T201


def show_lines(lines: Iterable[str]) -> None:
    """Print lines. On a terminal, break them between words and keep their indentation."""
    width = terminal_width()
    for line in map(printable, lines):
        text = line.lstrip(" ")
        indent = line[: len(line) - len(text)]
        for each in wrapped(text, width, indent, f"{indent}  "):
            show(each)


def show_details(lines: Iterable[str]) -> None:
    """Print lines that belong to the line above them."""
    show_lines(f"  {line}" for line in lines)


def terminal_width() -> int | None:
    """Return the number of columns, or None if the output is not a terminal.

    Lines in pipes are not broken, so grep and awk see whole lines.
    """
    if not sys.stdout.isatty():
        return None
    return os.get_terminal_size(sys.stdout.fileno()).columns or None


def not_checked(body: Mapping[str, Any]) -> str:
    """Return a note with the checks of kube-scheduler that the answer does not include."""
    return f"not checked: {', '.join(body['not_checked'])}"


def unread(body: Mapping[str, Any]) -> list[str]:
    """Return a line for each extender whose newest decisions may be missing."""
    return [
        f"no journal from extender {each['peer']}: {each['message']}" for each in body["unanswered"]
    ]


def note_unread(body: Mapping[str, Any]) -> None:
    """Print on stderr the extenders whose newest decisions may be missing."""
    for line in unread(body):
        show(line, error=True)


def note_more(body: Mapping[str, Any]) -> None:
    """Print a note on stderr if the answer is only the first page."""
    if body["continue"]:
        show("more are not shown: raise --limit. Example: --limit 1000", error=True)
