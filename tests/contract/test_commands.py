"""Checks that a shell parses the commands that users copy as intended, and that it ignores
comments.
"""

import json
import subprocess
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from headroom.contract.commands import command, commented
from headroom.contract.printable import printable, printable_json, printable_lines

#: Any text that can be an argument of a process.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
HOSTILE = "web; touch /tmp/x; #", "$(id)", "`id`", "a\nid", "'", "\\", "-rf", "*", "~", "a b", ""
#: Control characters, format characters, lone surrogates, and line separators.
UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
#: Letters, symbols and marks that no font shows.
BLANK = {
    *map(unicodedata.lookup, ("HANGUL FILLER", "HANGUL CHOSEONG FILLER")),
    *map(unicodedata.lookup, ("HALFWIDTH HANGUL FILLER", "BRAILLE PATTERN BLANK")),
    *map(unicodedata.lookup, ("COMBINING GRAPHEME JOINER", "VARIATION SELECTOR-16")),
    *map(unicodedata.lookup, ("MONGOLIAN FREE VARIATION SELECTOR ONE", "VARIATION SELECTOR-256")),
}


def shell(script: str) -> bytes:
    return subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout


def unprintable(text: str) -> list[str]:
    return [each for each in text if unicodedata.category(each) in UNPRINTABLE or each in BLANK]


def test_a_shell_reads_the_same_words() -> None:
    @given(st.lists(WORDS | st.sampled_from(HOSTILE), min_size=1, max_size=40))
    def agree(words: list[str]) -> None:
        found = shell("printf '%s\\0' " + command(*words))
        assert found.decode().split("\0")[:-1] == words

    agree()


def test_plain_words_are_not_quoted() -> None:
    words = "kubectl", "annotate", "node", "gpu-a.example", "headroom.gpu/device-choice=steered"
    assert command(*words) == " ".join(words)


@given(WORDS | st.sampled_from(HOSTILE))
def test_a_comment_is_one_line_that_does_nothing(text: str) -> None:
    line = commented(text)
    assert line.splitlines() == [line]
    assert shell(f"{line}\necho end") == b"end\n"


@given(st.text())
def test_printable_text_has_no_control_characters_and_keeps_all_others(text: str) -> None:
    shown = printable(text)
    assert unprintable(shown) == []
    assert len(shown) == len(text)
    replaced = {a for a, b in zip(text, shown, strict=True) if a != b}
    assert all(not a.isprintable() or printable(a) == "?" for a in replaced)
    assert unprintable(printable_lines(text).replace("\n", "")) == []
    assert printable_lines(text).count("\n") == text.count("\n")
    assert printable("GPU é 8 GiB…") == "GPU é 8 GiB…"


@given(st.dictionaries(st.text(), st.text(), max_size=4))
def test_json_without_control_characters_has_the_same_data(data: dict[str, str]) -> None:
    shown = printable_json(json.dumps(data, ensure_ascii=False))
    assert unprintable(shown) == []
    assert json.loads(shown) == data


def test_every_unprintable_character_is_replaced() -> None:
    characters = "".join(chr(code) for code in range(0x110000))
    assert unprintable(printable(characters)) == []
    escaped = printable_json(json.dumps(characters, ensure_ascii=False))
    assert unprintable(escaped) == []
