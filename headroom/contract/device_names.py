"""Short names of devices for users, unique on a node."""

import re
from collections.abc import Sequence

#: The first group is the part of a UUID by which users can distinguish devices.
_UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]+")


def device_name(uuid: str, index: int, kind: str) -> str:
    """Return the index of a GPU, or the beginning of its UUID.

    The index does not identify a MIG device, which has the index of its GPU, and some agents report
    no index (-1). For such devices, return the beginning of the UUID, or the whole UUID if it does
    not have the driver's format.
    """
    if index >= 0 and kind != "mig":
        return str(index)
    found = _UUID.fullmatch(uuid)
    return found[1] if found else uuid


def nouns(names: Sequence[str]) -> str:
    """Return names for use in a sentence, such as ``GPU 0, 1``."""
    if all(name.isdecimal() for name in names):
        return f"GPU {', '.join(names)}"
    return ", ".join(map(noun, names))


def noun(name: str) -> str:
    """Return a name for use in a sentence, such as ``GPU 0`` or ``GPU-5e8a1b2c``."""
    return name if name.startswith(("GPU-", "MIG-")) else f"GPU {name}"
