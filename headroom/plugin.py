"""`kubectl headroom`: the commands that read the debug API, and the doctor.

kubectl runs ``kubectl-headroom`` for the command. For shell completion it runs
``kubectl_complete-headroom``, if that is on the PATH.
"""

import contextlib
import io
import os
import shlex
import sys

from extender.doctor.command import doctor
from headroom.kubectl.commands import app, main
from headroom.kubectl.help import PLAN

app.command(rich_help_panel=PLAN)(doctor)

#: Cobra's directive after the completions: do not complete file names.
_NO_FILES = ":4"


def complete() -> None:
    """Print completions for the words after ``headroom``; the last word may be empty.

    kubectl reads the format that Typer prints for fish: a word, a tab, a description.
    """
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    *words, last = sys.argv[1:] or [""]
    typed = [*map(shlex.quote, words), shlex.quote(last) if last else ""]
    os.environ |= {
        "_KUBECTL_HEADROOM_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": " ".join(["kubectl-headroom", *typed]),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        app(args=[], prog_name="kubectl-headroom")
    # Typer prints an empty word if there are no completions.
    print("\n".join([*filter(None, printed.getvalue().splitlines()), _NO_FILES]))  # noqa: T201


__all__ = ["complete", "main"]

if __name__ == "__main__":
    main()
