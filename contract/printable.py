"""Makes text of others safe to print: on terminals, in Events and in objects.

Tenants choose names of owners, annotations, messages, images and names of processes. Control
characters in them can rewrite a terminal, and direction marks can change the order of what a person
reads.
"""


def printable(text: str) -> str:
    """Return the text with "?" for each character that cannot be printed.

    These are control characters (ESC, newline), invisible marks and marks that change the direction
    of text, separators except for the space, and surrogates.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def printable_lines(text: str) -> str:
    """Return the text with "?" for each character that cannot be printed, except for newlines."""
    return "\n".join(map(printable, text.split("\n")))
