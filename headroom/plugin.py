"""`kubectl headroom`: the commands that read the debug API, the doctor, and the plan.

kubectl runs ``kubectl-headroom`` for the command. For shell completion, it runs
``kubectl_complete-headroom`` if that is on the PATH.
"""

import contextlib
import io
import os
import shlex
import sys

import typer

from headroom.doctor.command import doctor
from headroom.kubectl.commands import app, main
from headroom.kubectl.help import PLAN

app.command(rich_help_panel=PLAN)(doctor)

#: The command ``plan`` parses its own options, so that its packages are imported only when it runs.
_OWN_OPTIONS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": list[str](),
}


@app.command(context_settings=_OWN_OPTIONS, add_help_option=False, rich_help_panel=PLAN)
def plan(context: typer.Context) -> None:
    """Compute from a cluster's history whether sharing would save GPUs."""
    try:
        from headroom.planner.command import app as planning
    except ImportError as err:
        typer.echo(
            f"kubectl headroom: {err}; plan runs Headroom's placement on this machine. Install "
            "it: pip install 'headroom-gpu[extender]'",
            err=True,
        )
        raise typer.Exit(2) from err
    args, given = context.args, context.obj
    if args[:1] == ["record"]:
        flags = {"--kubeconfig": given.kubeconfig, "--context": given.context}
        where = (word for flag, value in flags.items() if value for word in (flag, value))
        args = ["record", *where, *args[1:]]
    planning(args=args, prog_name="kubectl headroom plan")


#: Cobra's directive after the completions: do not complete file names.
_NO_FILES = ":4"


def complete() -> None:
    """Print completions for the words after ``headroom``. The last word may be empty.

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


__all__ = ["app", "complete", "main"]

if __name__ == "__main__":
    main()
