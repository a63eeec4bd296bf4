"""Commands and comments that users copy into a shell."""

import shlex

from headroom.contract.printable import printable


def command(*words: str) -> str:
    """Return the command that a shell splits into exactly these words, with quotes if necessary.

    Example: ``kubectl -n team patch deployment llm --type merge -p '{"spec": {}}'``.
    """
    return shlex.join(words)


def commented(text: str) -> str:
    """Return any text as a single comment of a shell script or of YAML."""
    return f"# {printable(text)}"
