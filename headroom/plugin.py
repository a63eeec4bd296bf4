"""`kubectl headroom`: the commands that read the debug API, and the doctor beside them.

kubectl runs ``kubectl-headroom`` for it and, where that is on the PATH as well,
``kubectl_complete-headroom`` for what the shell is to offer.
"""

import contextlib
import io
import os
import shlex
import sys

from extender.doctor.command import doctor
from headroom.kubectl.app import app, main

app.command()(doctor)

#: What kubectl and Cobra's scripts are told after the words: offer no names of files.
_NO_FILES = ":4"


def complete() -> None:
    """Answer kubectl, whose arguments are the words after ``headroom``; the last may be empty.

    Typer's answer to fish is what kubectl reads: a word, a tab, what it means.
    """
    *words, last = sys.argv[1:] or [""]
    typed = [*map(shlex.quote, words), shlex.quote(last) if last else ""]
    os.environ |= {
        "_KUBECTL_HEADROOM_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": " ".join(["kubectl-headroom", *typed]),
    }
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        app(args=[], prog_name="kubectl-headroom")
    # Where there is nothing to offer typer says an empty word.
    print("\n".join([*filter(None, said.getvalue().splitlines()), _NO_FILES]))  # noqa: T201


__all__ = ["complete", "main"]

if __name__ == "__main__":
    main()
