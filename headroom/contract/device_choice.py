"""Reasons why device choice steered has no effect, for a node's report and for messages to
users."""

import re

#: The first minor version whose kubelets are not steered. When an agent is killed, these kubelets
#: immediately use the device plugin's choice, even for pods whose GPU Headroom has reserved.
FIRST_UNSTEERED = (1, 37)

#: Why an agent cannot steer, and the two settings that permit it.
STEERING_NOT_PERMITTED = (
    "not permitted: the agent can only read the kubelet's device plugin directory"
    " (chart value agent.steering.permitted, or component deploy/components/steering)"
)
#: The obstacle if an agent does not report whether it may steer.
STEERING_UNKNOWN = "its agent has not reported whether it may steer"


#: The obstacle if the version of the kubelet is unknown.
KUBELET_UNKNOWN = "the version of the kubelet cannot be read from the Node's status"


def minor_version(version: str) -> tuple[int, int] | None:
    """Return the major and minor version of a kubelet, such as v1.36.3, or None if it has another
    format.

    Suffixes of distributions and pre-releases are ignored, such as v1.36.3+k3s1 and v1.37.0-beta.0.
    """
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version)
    return (int(found[1]), int(found[2])) if found else None


def why_kubelet_not_steered(version: str) -> str:
    """Return why a kubelet of this version is not steered, or an empty string if it is steered or
    unknown."""
    found = minor_version(version)
    if found is None or found < FIRST_UNSTEERED:
        return ""
    return (
        f"steering needs a kubelet older than {FIRST_UNSTEERED[0]}.{FIRST_UNSTEERED[1]}, and this"
        f" node has {version}, which lets the device plugin choose as soon as an agent is killed;"
        " use device choice predicted or gated"
    )
