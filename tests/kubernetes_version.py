"""Selects the Kubernetes version that the tests run on: the newest version, or for example 1.34
with ``TEST_KUBERNETES=1.34``.

Component names without a version refer to this minor version. If only some components of a
pre-release can be built, the other components have the newest version.

``TEST_GATES=AllBeta=true`` sets feature gates of the API server and of the kube-scheduler with this
version, and the API server serves the APIs of that stage. docs/design/kube-scheduler.md shows the
effects of the feature gates.
"""

import os

from headroom.doctor.scheduler_flags import BACKOFF_GATE, accepts_gate
from tests.gobin.build import targets, version_tuple
from tests.gobin.kubernetes import COMPONENTS, VERSIONS, minor_of

NEWEST = next(minor_of(version) for version in VERSIONS if "-" not in version)
UNDER_TEST = os.environ.get("TEST_KUBERNETES", NEWEST)
#: Feature gates in the syntax of the flag --feature-gates.
GATES = tuple(filter(None, os.environ.get("TEST_GATES", "").split(",")))


def of_version(name: str, minor: str = UNDER_TEST) -> str:
    """Return the build target of a component, for example ``kubelet-1.34`` for version 1.34 of
    ``kubelet``.
    """
    if name not in COMPONENTS or minor == NEWEST:
        return name
    versioned = f"{name}-{minor}"
    return versioned if versioned in targets() else name


def not_newer(*names: str) -> tuple[str, ...]:
    """Return the components that are not newer than the Kubernetes version under test.

    A kube-scheduler newer than its API server can wait forever for an API.
    """
    return tuple(name for name in names if _minor(name) <= version_tuple(UNDER_TEST))


def is_at_least(minor: str) -> bool:
    """Return whether the version of Kubernetes under test is ``minor`` or newer."""
    return version_tuple(UNDER_TEST) >= version_tuple(minor)


def scheduler_flags(name: str, *own_gates: str) -> tuple[str, ...]:
    """Return the shipped command line flags that deploy/base/kube-scheduler.yaml cannot set.

    ``name`` is the build target of a kube-scheduler. A comment in that file explains the flags.
    ``own_gates`` are further feature gates, which override all other feature gates.
    """
    backoff = [BACKOFF_GATE] if has_backoff_gate(name) else []
    # The gates apply only to the version under test, because an older kube-scheduler can need alpha
    # APIs that a newer API server does not serve.
    tested = GATES if _minor(name) == version_tuple(UNDER_TEST) else ()
    gates = (*tested, *backoff, *own_gates)
    return (f"--feature-gates={','.join(gates)}",) if gates else ()


def has_backoff_gate(name: str) -> bool:
    """Return whether the kube-scheduler of this build target has the feature gate for the
    back-off.
    """
    return accepts_gate(_minor(name))


def apiserver_flags() -> tuple[str, ...]:
    """Return the API server's flags for ``GATES``."""
    if not GATES:
        return ()
    apis = "api/all=true" if "AllAlpha=true" in GATES else "api/beta=true"
    return f"--feature-gates={','.join(GATES)}", f"--runtime-config={apis}"


def _minor(name: str) -> tuple[int, ...]:
    name = of_version(name)
    return version_tuple(NEWEST if name in COMPONENTS else name.rpartition("-")[2])


#: The kube-schedulers that tests run on one API server, oldest version first.
SCHEDULERS = (*not_newer("kube-scheduler-1.34", "kube-scheduler-1.36"), "kube-scheduler")
