"""The help of ``kubectl headroom``, with its commands in groups, as kubectl prints its own."""

from enum import Enum
from typing import Any

import typer
from typer.core import TyperGroup

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

#: Headings of the groups, in order.
MEMORY = "See memory"
EXPLAIN = "Explain decisions"
PLAN = "Plan and check"
MAINTAIN = "Maintain GPUs"
FOLLOW = "Follow and report"


class GroupedHelp(TyperGroup):
    """Lists the commands by their ``rich_help_panel``, without frames and colours."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            # No limit: two lines are better than a cut one.
            row = name, command.get_short_help_str(limit=1000)
            groups.setdefault(command.rich_help_panel or "Commands", []).append(row)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class Subject(Enum):
    """A kind of object that `top` lists."""

    NODE = "node"
    GPU = "gpu"
    POD = "pod"
    MODEL = "model"

    @classmethod
    def parsed(cls, text: str) -> "Subject":
        """Return the subject of a word, also in the plural, as kubectl takes it."""
        try:
            return cls(text.removesuffix("s"))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is not one of {', '.join(cls.names(''))}. Example: top gpu"
            ) from None

    @classmethod
    def names(cls, incomplete: str) -> list[str]:
        return [each.value for each in cls if each.value.startswith(incomplete)]
