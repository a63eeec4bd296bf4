"""Accepts options before and after the name of a command, as kubectl does.

Click accepts options of the program only before the name, and options of the command only after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Maps the name of an option to whether a value follows it.
_Options = Mapping[str, bool]


def in_order(words: Sequence[str], program: Any) -> list[str]:
    """Return the words with the options of the program before the name of the command, and the
    options of the command after it. ``program`` is a Click group.

    ``help COMMAND`` becomes ``COMMAND --help``. If a word before the name is unknown, all words
    stay where they are, and Click reports the word.
    """
    of_program = _options([program])
    known = {**_options(program.commands.values()), **of_program}
    before, moved, at = list[str](), list[str](), 0
    while at < len(words) and words[at].startswith("-"):
        length = _length(words[at], known)
        if length is None:
            return list(words)
        taken = words[at : at + length]
        (before if _first(words[at]) in of_program else moved).extend(taken)
        at += length
    if at >= len(words):
        return list(words)
    name, rest = words[at], words[at + 1 :]
    if name == "help":
        return [*before, *moved, *rest[:1], "--help"]
    command = program.commands.get(name)
    # The plan parses its own words.
    if command is None or command.context_settings.get("ignore_unknown_options"):
        return [*before, name, *moved, *rest]
    global_words, own = _divided(rest, _options([command]), of_program)
    return [*before, *global_words, name, *moved, *own]


def _divided(
    words: Sequence[str], of_command: _Options, of_program: _Options
) -> tuple[list[str], list[str]]:
    """Return the options of the program among the words after the command, and the other words."""
    found, others, at = list[str](), list[str](), 0
    while at < len(words) and words[at] != "--":
        ours = _first(words[at]) in of_program
        length = _length(words[at], of_program if ours else of_command) or 1
        taken = words[at : at + length]
        # If its value is missing, the option stays, so that it cannot take the command's name.
        (found if ours and len(taken) == length else others).extend(taken)
        at += length
    return found, [*others, *words[at:]]


def _options(commands: Iterable[Any]) -> dict[str, bool]:
    """Return all options of the commands, without those that take a value in only some commands."""
    found, ambiguous = dict[str, bool](), set[str]()
    for command in commands:
        for param in command.params:
            if param.param_type_name != "option":
                continue
            for name in (*param.opts, *param.secondary_opts):
                if found.setdefault(name, not param.is_flag) is param.is_flag:
                    ambiguous.add(name)
    return {name: valued for name, valued in found.items() if name not in ambiguous}


def _first(word: str) -> str:
    """Return the name of the option in a word, such as --output=json, or the first of -Ao."""
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def _length(word: str, options: _Options) -> int | None:
    """Return how many words an option and its value take, or None if the option is unknown."""
    if word.startswith("--"):
        name, attached, _ = word.partition("=")
        return None if name not in options else 2 if options[name] and not attached else 1
    for at, letter in enumerate(word[1:], 2):
        valued = options.get(f"-{letter}")
        if valued is None:
            return None
        if valued:
            return 1 if word[at:] else 2
    return 1
