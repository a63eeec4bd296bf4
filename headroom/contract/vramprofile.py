"""The VRAMProfile object, which contains the memory peaks of an owner's past lives.

The recorder writes it, and the console and the webhook read it. It has no ``spec``. Each object
stands for one owner, such as a Deployment, or for a family of owners, such as the Jobs whose names
have the same prefix.
"""

import re
from datetime import UTC, datetime
from hashlib import sha256

import msgspec

from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GROUP, VERSION
from headroom.contract.kube import MAX_NAME, KubeStruct, ObjectMeta

PROFILE_PLURAL = "vramprofiles"
PROFILE_KIND = "VRAMProfile"
API_VERSION = f"{GROUP}/{VERSION}"

#: Maximum number of ``VRAMProfileStatus.controllers``.
MAX_CONTROLLERS = 4
#: 10000-01-01T00:00:00Z, the first time that RFC 3339 cannot express.
_YEAR_10000_S = 253_402_300_800
_NOT_IN_NAMES = re.compile(r"[^a-z0-9-]+")


class ProfileOwner(KubeStruct, frozen=True):
    """The owner at the end of the chain of controllers, or the family of such owners."""

    kind: str = ""
    name: str = ""
    api_version: str = ""
    #: Whether owners of this kind are created again for each run. If so, ``name`` is the prefix of
    #: their names.
    family: bool = False


class ProfileController(KubeStruct, frozen=True):
    """The kind of the controllers that own pods directly, and the prefix of their names.

    Example: ReplicaSet ``llm`` for ``llm-5d4f``.
    """

    kind: str = ""
    name: str = ""


class TrackStatus(KubeStruct, frozen=True):
    """The lives of one program. Histograms map buckets to their weights at the time ``as_of``, in
    thousandths."""

    #: Fingerprint of image, command, arguments and environment. Empty if they differ between lives.
    program: str = ""
    #: The time to which the weights refer (RFC 3339).
    as_of: str = ""
    complete: dict[str, int] = msgspec.field(default_factory=dict)
    censored: dict[str, int] = msgspec.field(default_factory=dict)
    running: dict[str, int] = msgspec.field(default_factory=dict)
    running_censored: dict[str, int] = msgspec.field(default_factory=dict)
    ended: int = 0
    flat: int = 0
    first: str = ""
    last: str = ""
    tested: int = 0
    missed: int = 0
    missed_fitting: int = 0
    unsettled: int = 0
    running_unsettled: int = 0
    outgrown: int = 0
    running_outgrown: int = 0


class ContainerStatus(KubeStruct, frozen=True):
    """The lives of one container on one device model."""

    container: str
    #: Product name of the device.
    model: str = ""
    #: Memory of the largest device of this model without the driver's reserve, or 0 if unknown.
    memory_bytes: int = msgspec.field(default=0, name="memory")
    #: The program's family, such as vLLM. Empty if unknown.
    family: str = ""
    #: Whether programs differ from life to life.
    varies: bool = False
    #: The tracks in the order of their last life, oldest first.
    tracks: list[TrackStatus] = msgspec.field(default_factory=list)


class VRAMProfileStatus(KubeStruct, frozen=True):
    #: When the recorder wrote it (RFC 3339).
    observed_at: str = ""
    owner: ProfileOwner = ProfileOwner()
    #: The controllers by which the webhook finds the profile of a pod that does not exist yet,
    #: newest last.
    controllers: list[ProfileController] = msgspec.field(default_factory=list)
    containers: list[ContainerStatus] = msgspec.field(default_factory=list)
    #: Number of lives that count in all containers, for the printer column.
    lives: int = 0


class VRAMProfile(KubeStruct, frozen=True):
    metadata: ObjectMeta
    # Factories, because msgspec would omit plain defaults and the API server requires both fields.
    api_version: str = msgspec.field(default_factory=lambda: API_VERSION)
    kind: str = msgspec.field(default_factory=lambda: PROFILE_KIND)
    status: VRAMProfileStatus = VRAMProfileStatus()


def profile_name(owner: ProfileOwner) -> str:
    """Return the name of an owner's VRAMProfile.

    Names that are not valid object names get a hash, so that different owners have different names.
    """
    # The group distinguishes kinds with the same name, such as Job of batch and of
    # batch.volcano.sh.
    group = owner.api_version.partition("/")[0] if "/" in owner.api_version else ""
    plain = f"{owner.kind.lower()}-{owner.name}"
    shaped = _NOT_IN_NAMES.sub("-", plain).strip("-")
    if shaped == plain and len(plain) <= MAX_NAME and group in ("", "apps", "batch"):
        return plain
    digest = sha256(f"{group}/{owner.kind}/{owner.name}".encode()).hexdigest()[:8]
    return f"{shaped[: MAX_NAME - 9].rstrip('-')}-{digest}"


def stamp(time_s: float) -> str:
    """Return seconds since the epoch as RFC 3339, or an empty string for 0."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time_s else ""


def seconds(text: str) -> float:
    """Return an RFC 3339 time as seconds since the epoch.

    Return 0 if the text is empty or not a time with a zone, or if ``stamp`` cannot write the time
    in UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
        time_s = moment.timestamp() if moment.tzinfo else 0.0
    except (ValueError, OverflowError):
        return 0.0
    return time_s if 0 < time_s < _YEAR_10000_S else 0.0


_decoder = msgspec.json.Decoder(VRAMProfile)


def decode_profile(body: bytes | msgspec.Raw) -> VRAMProfile:
    """Decode a VRAMProfile. Raises ``BadReport``, which names the field."""
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise BadReport(f"VRAMProfile cannot be read: {err}") from err
