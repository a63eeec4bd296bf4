"""The help of ``kubectl headroom``. Commands are in groups, as in the help of kubectl."""

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer
from typer.core import TyperGroup

from headroom.kubectl.word_order import in_order

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

#: Headings of the groups, in order.
MEMORY = "See memory"
EXPLAIN = "Explain decisions"
PLAN = "Plan and check"
MAINTAIN = "Maintain GPUs"
FOLLOW = "Follow and report"


#: Maps each command to a correct command line, for error messages that contain no example.
_EXAMPLES = {
    "capacity": "capacity --vram 20Gi",
    "cordon": "cordon gpu-2 0",
    "score": "score trainer --node gpu-2",
    "top": "top pod --search trainer",
    "uncordon": "uncordon gpu-2 0",
    "why": "why trainer -n team-a",
}


class GroupedHelp(TyperGroup):
    """Lists the commands by their ``rich_help_panel``, without frames and colors.

    Errors on the command line show a correct command line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of the program, which may also come after the command."""
        with self._examples(ctx):
            return super().parse_args(ctx, in_order(args, self))

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command, and run it."""
        with self._examples(ctx):
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _examples(self, ctx: Any) -> Iterator[None]:
        """Extend the messages of errors on the command line."""
        try:
            yield
        except Exception as err:
            if hasattr(err, "format_message"):  # Typer does not export its base class
                message = self._completed(err, ctx.command_path)
                err.format_message = lambda: message
            raise

    def _completed(self, error: Any, program: str) -> str:
        """Return the message of an error, with an example of a correct command line.

        ``program`` is the name of the program as the user typed it.
        """
        text = str(error.format_message()).replace("Value error, ", "")
        command = error.ctx.command if error.ctx else self
        if text.startswith("No such option") and error.option_name in _options(self):
            return f"Option '{error.option_name}' requires an argument."
        example = _EXAMPLES.get(command.name or "")
        if example and text.startswith(("Missing ", "Got unexpected extra ")):
            return f"{text.removesuffix('.')}. Example: {program} {example}"
        return text

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            # There is no limit, because two lines are better than a truncated one.
            row = name, command.get_short_help_str(limit=1000)
            groups.setdefault(command.rich_help_panel or "Commands", []).append(row)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _options(*commands: Any) -> set[str]:
    """Return the names of all options of the commands."""
    return {name for command in commands for param in command.params for name in param.opts}


class Subject(Enum):
    """A kind of object that `top` lists."""

    NODE = "node"
    GPU = "gpu"
    POD = "pod"
    MODEL = "model"

    @classmethod
    def parsed(cls, text: str) -> "Subject":
        """Return the subject that a word names. Like kubectl, accept singular and plural."""
        try:
            return cls(text.removesuffix("s"))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is not one of {', '.join(cls.names(''))}. Example: top gpu"
            ) from None

    @classmethod
    def names(cls, incomplete: str) -> list[str]:
        return [each.value for each in cls if each.value.startswith(incomplete)]
