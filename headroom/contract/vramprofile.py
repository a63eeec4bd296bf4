"""The VRAMProfile object: the memory peaks of one owner's past lives.

The recorder writes it; console and webhook read it. There is no ``spec``. One object stands for one
owner, such as a Deployment, or for a family of owners, such as the Jobs of one name.
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
    #: Whether owners of this kind are created again for each run; ``name`` is then what their
    #: names begin with.
    family: bool = False


class ProfileController(KubeStruct, frozen=True):
    """The kind of pods' direct controllers, and the text that their names begin with.

    Example: ReplicaSet ``llm`` for ``llm-5d4f``.
    """

    kind: str = ""
    name: str = ""


class TrackStatus(KubeStruct, frozen=True):
    """The lives of one program. Histograms are bucket -> weight in thousandths, as of ``as_of``."""

    #: Fingerprint of image, command, arguments and environment; empty if they differ from life to
    #: life.
    program: str = ""
    #: RFC 3339.
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
    unsettled: int = 0
    running_unsettled: int = 0
    outgrown: int = 0
    running_outgrown: int = 0


class ContainerStatus(KubeStruct, frozen=True):
    """The lives of one container on one device model."""

    container: str
    #: Product name of the device.
    model: str = ""
    #: Memory of the largest such device without the driver's part; 0 if unknown.
    memory_bytes: int = msgspec.field(default=0, name="memory")
    #: The program's family, such as vLLM; empty if unknown.
    family: str = ""
    #: Whether programs differ from life to life.
    varies: bool = False
    #: In order of their last life, the oldest first.
    tracks: list[TrackStatus] = msgspec.field(default_factory=list)


class VRAMProfileStatus(KubeStruct, frozen=True):
    #: RFC 3339, when the recorder wrote it.
    observed_at: str = ""
    owner: ProfileOwner = ProfileOwner()
    #: By these a new pod finds the profile before it exists; the newest last.
    controllers: list[ProfileController] = msgspec.field(default_factory=list)
    containers: list[ContainerStatus] = msgspec.field(default_factory=list)
    #: For the printer column: lives that count, of all containers.
    lives: int = 0


class VRAMProfile(KubeStruct, frozen=True):
    metadata: ObjectMeta
    # Factories, because msgspec would omit plain defaults, and the API server requires both.
    api_version: str = msgspec.field(default_factory=lambda: API_VERSION)
    kind: str = msgspec.field(default_factory=lambda: PROFILE_KIND)
    status: VRAMProfileStatus = VRAMProfileStatus()


def profile_name(owner: ProfileOwner) -> str:
    """Return the name of an owner's VRAMProfile.

    Names that cannot be used as they are get a hash, so that different owners have different names.
    """
    # The group distinguishes kinds of the same name, such as Job of batch and of batch.volcano.sh.
    group = owner.api_version.partition("/")[0] if "/" in owner.api_version else ""
    plain = f"{owner.kind.lower()}-{owner.name}"
    shaped = _NOT_IN_NAMES.sub("-", plain).strip("-")
    if shaped == plain and len(plain) <= MAX_NAME and group in ("", "apps", "batch"):
        return plain
    digest = sha256(f"{group}/{owner.kind}/{owner.name}".encode()).hexdigest()[:8]
    return f"{shaped[: MAX_NAME - 9].rstrip('-')}-{digest}"


def stamp(time_s: float) -> str:
    """Return seconds since the epoch as RFC 3339; empty for 0."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time_s else ""


def seconds(text: str) -> float:
    """Return RFC 3339 as seconds since the epoch.

    The result is 0 if the text is empty, if it is no time with a zone, or if ``stamp`` cannot write
    the time in UTC.
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
