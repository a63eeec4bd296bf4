"""Short names of devices for people, unique on a node."""

import re
from collections.abc import Sequence

#: The first group is the part of a UUID that people compare.
_UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]+")


def device_name(uuid: str, index: int, kind: str) -> str:
    """Return the index of a GPU.

    A MIG device has the index of its GPU, and some agents report no index (-1): return the start of
    the UUID in both cases, or the whole UUID if it has another form than the driver's.
    """
    if index >= 0 and kind != "mig":
        return str(index)
    found = _UUID.fullmatch(uuid)
    return found[1] if found else uuid


def nouns(names: Sequence[str]) -> str:
    """Return names as they are written in a sentence: ``GPU 0, 1``."""
    if all(name.isdecimal() for name in names):
        return f"GPU {', '.join(names)}"
    return ", ".join(map(noun, names))


def noun(name: str) -> str:
    """Return a name as it is written in a sentence: ``GPU 0``, or ``GPU-5e8a1b2c``."""
    return name if name.startswith(("GPU-", "MIG-")) else f"GPU {name}"
