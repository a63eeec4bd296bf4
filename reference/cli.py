"""The page of all commands and options, read from Typer's definitions."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from agent.settings import FLAGS
from headroom.__main__ import COMMANDS, DEBUG_API_COMMANDS
from headroom.commands import app as headroom
from headroom.plugin import app as plugin
from reference.markdown import as_code, code, head, sentence, table

_INTRO = """\
`headroom` has all commands. `kubectl headroom` has the commands that read the debug API, `doctor`
and `plan`: `headroom top` is the same as `kubectl headroom top`, and `kubectl headroom plan` has
the options of [headroom plan](#headroom-plan). [kubectl.md](kubectl.md) shows how to install the
plugin and how it connects.

"""
_EXIT = """\
| exit status | meaning |
|---|---|
| 0 | answered |
| 1 | the object does not exist, or the answer is no: a pod of `whatif` would not fit; a pod stayed after `cordon --evict`; `defrag` has no moves, or `--apply` stopped early; `doctor` has a warning |
| 2 | an error on the command line, such as an unknown context or GPU; `doctor` could check nothing |
| 3 | the console or the API server cannot be reached, does not answer, or does not let you do it |

"""  # noqa: E501
_AGENT = """\
## `headroom agent`

[settings.md](settings.md#the-agent) has all flags. These flags are for use by hand:

"""
#: Type of an option's value, as Typer prints it -> the word on the page.
_TYPES = {"str": "TEXT", "(int|float)( range)?": "NUMBER", "(path|FileText)": "PATH"}
_GATE = """\
`headroom gate` takes no arguments: it runs as the init container `headroom-gate`, and waits until
the GPU of its pod has enough free memory.
"""


def page() -> str:
    """Return docs/reference/cli.md."""
    whole: Any = typer.main.get_command(plugin)
    own: Any = typer.main.get_command(headroom)
    text = head("Commands", "the options of the commands in extender, headroom and agent") + _INTRO
    text += "## `kubectl headroom`\n\nThese options can be before or after the command:\n\n"
    text += table("option | default | description", _options(whole)) + _EXIT
    for name in _in_order(whole.commands):
        # The plan reads its own options in the plugin, so they are shown below.
        if name != "plan":
            text += _command(whole.commands[name], "kubectl headroom", name)
    text += "## `headroom`\n\n"
    rows = [
        (code(name), meaning)
        for commands in COMMANDS.values()
        for name, meaning in commands.items()
        if name not in DEBUG_API_COMMANDS
    ]
    text += table("command | description", rows)
    for name in _in_order(own.commands):
        if name not in DEBUG_API_COMMANDS and name != "doctor":
            text += _command(own.commands[name], "headroom", name)
    flags = [
        (code(f"--{flag.flag}"), code(flag.default), sentence(flag.consequence))
        for flag in FLAGS
        if not flag.env
    ]
    return text + _AGENT + table("option | default | description", flags) + _GATE


def _in_order(commands: Mapping[str, Any]) -> list[str]:
    """Return the names of commands in the order of `headroom --help`."""
    known = [name for group in COMMANDS.values() for name in group]
    return sorted(commands, key=known.index)


def _command(command: Any, parent: str, name: str) -> str:
    """Return the section of a command and, below it, of its subcommands.

    Raises ``ValueError`` if the command or an option has no description.
    """
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [_argument(each) for each in arguments]
    commands = getattr(command, "commands", {})
    title = " ".join((parent, name, *words))
    if not command.help:
        raise ValueError(f"{title} has no help text; add a docstring to its function")
    text = f"### `{title}`\n\n{as_code(inspect.cleandoc(command.help)).rstrip()}\n\n"
    text += "".join(f"- `{_argument(each)}`: {_help(each, title)}\n" for each in arguments)
    text += "\n" if arguments else ""
    if rows := list(_options(command)):
        text += table("option | default | description", rows)
    return text + "".join(
        _command(below, f"{parent} {name}", word) for word, below in commands.items()
    )


def _argument(argument: Any) -> str:
    """Return how the argument is written, such as `POD`, `GPU...` or `[POD]`."""
    word = str(argument.metavar or argument.name.upper())
    if word.startswith("["):
        return word
    word += "..." if argument.nargs == -1 and not word.endswith("...") else ""
    return word if argument.required else f"[{word}]"


def _options(command: Any) -> Iterator[tuple[str, str, str]]:
    """Yield spelling with the type of the value, default, and description of each option."""
    context = typer.Context(command)
    for option in command.params:
        if option.param_type_name == "argument" or option.hidden:
            continue
        spelling = option.get_help_record(context)[0]
        # Readers do not know Python's names of types.
        spelling = re.sub(r"<list\[(\w+)\]>", r"<\1>...", spelling)
        for pattern, word in _TYPES.items():
            spelling = re.sub(f"<{pattern}>", word, spelling)
        variable = f" Variable: `{option.envvar}`." if option.envvar else ""
        yield code(spelling), _default(option), _help(option, command.name) + variable


def _help(parameter: Any, where: object) -> str:
    if not parameter.help:
        raise ValueError(f"{parameter.name} of {where} has no help text; add it to its definition")
    return as_code(parameter.help)


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value == []:
        return ""
    return code(option.opts[0] if value is True else getattr(value, "value", value))
