"""Commands and comments for people to copy into a shell."""

import shlex

from headroom.contract.printable import printable


def command(*words: str) -> str:
    """Return the command of which a shell makes exactly these words: quoted where necessary.

    Example: ``kubectl -n team patch deployment llm --type merge -p '{"spec": {}}'``.
    """
    return shlex.join(words)


def commented(text: str) -> str:
    """Return the text as one comment of a shell script or of YAML, whatever it contains."""
    return f"# {printable(text)}"
