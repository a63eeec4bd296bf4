"""Makes foreign text safe to print on terminals, in Events and in objects.

Tenants choose names of owners, annotations, messages, images and names of processes. Control
characters in these texts can rewrite a terminal, and direction marks can change the order in which
a person reads them.
"""

import json
import re

_NOT_ASCII = re.compile("[^\\x00-\\x7e]")
_NOT_PLAIN = re.compile("[^ -~]")
#: Letters, symbols and marks that no font shows: fillers, the Braille blank, and variation
#: selectors.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def printable(text: str) -> str:
    """Return the text with "?" for each character that cannot be printed.

    Such characters are control characters (ESC, newline), invisible marks, marks that change the
    direction of text, separators except for the space, and surrogates.
    """
    if not text.isascii():
        text = _BLANK.sub("?", text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def plain(text: str) -> str:
    """Return the text with "?" for each character that is not printable ASCII.

    The schemas of Headroom's objects accept only such text, because kubectl prints it unchanged.
    Right-to-left letters are replaced too, because they change the order of a line.
    """
    if text.isascii() and text.isprintable():
        return text
    return _NOT_PLAIN.sub("?", text)


def printable_lines(text: str) -> str:
    """Return the text with "?" for each character that cannot be printed, except newlines."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """Escape the characters of JSON that cannot be printed. Its data does not change.

    JSON already escapes control characters up to U+001F.
    """
    if text.isascii() and "\x7f" not in text:
        return text
    return _NOT_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable() and not _BLANK.match(character):
        return character
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]
