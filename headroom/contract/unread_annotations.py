"""Warns about annotations that Headroom does not read, such as annotations with a misspelt name."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice

from headroom.contract.annotations import PREFIX, VRAM, VRAM_LIMIT, is_extender_annotation
from headroom.contract.errors import shortened

#: Maximum number of warnings in a response, because an API server drops warnings after about 4 KiB.
MAX_WARNINGS = 12
#: Maximum number of characters of an annotation's name that are compared to suggest another name.
MAX_NAME_CHARS = 80

#: Names that users may write after the prefix of Headroom's annotations, and the names that they
#: mean.
_SYNONYMS = {
    **dict.fromkeys(("memory", "mem", "gpu-memory", "gpu-mem", "gpumem", "vmem"), VRAM),
    **dict.fromkeys(("memory-limit", "mem-limit", "limit"), VRAM_LIMIT),
}


def without_effect(
    annotations: Mapping[str, str] | None,
    known: Collection[str],
    where: str = "",
    labels: Collection[str] = (),
) -> Iterator[str]:
    """Yield a warning for each annotation whose name is not in ``known``.

    A name with another prefix is reported only if it is similar to a known name. ``labels``
    contains names that take effect only as labels.
    """
    keys = (
        key
        for key in sorted(annotations or {})
        if _may_be_ours(key) and key not in known and not is_extender_annotation(key)
    )
    # A response cannot contain more warnings, and the search for similar names is slow.
    for key in islice(keys, MAX_WARNINGS):
        if key in labels:
            yield f"annotation {key} has no effect; set a label of that name"
            continue
        meant = _SYNONYMS.get(key.removeprefix(PREFIX).lower(), "")
        near = [meant] if meant in known else _similar(key, known)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        if near or key.startswith(PREFIX):
            reads = f"Headroom does not read it{where}{suggestion}"
            yield f"annotation {shortened(key)} has no effect: {reads}"


def _may_be_ours(key: str) -> bool:
    """Return whether the name has a prefix that may be misspelt, such as headrom.gpu/."""
    return key.startswith("headroom") or (key.startswith("h") and ".gpu/" in key[:MAX_NAME_CHARS])


def _similar(key: str, known: Collection[str]) -> list[str]:
    """Return the most similar known name, or an empty list."""
    return get_close_matches(key[:MAX_NAME_CHARS].lower(), known, 1, 0.8)
