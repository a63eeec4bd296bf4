"""The commands of a page, so that tests can run them."""

from tests.controlplane import ROOT


def commands(page: str, mark: str) -> list[str]:
    """The shell blocks of a page between two marks, as they are to be typed."""
    text = (ROOT / "docs" / page).read_text()
    part = text.split(f"<!-- {mark} -->")[1].split(f"<!-- end of {mark} -->")[0]
    return [block.split("```")[0] for block in part.split("```sh\n")[1:]]
