"""Tests whether a pod's own NVIDIA_VISIBLE_DEVICES has an effect with each configuration of the
container toolkit.
"""

import tomllib
from typing import Any

import pytest

from agent.probes.plugin_config import ignores_environment
from agent.sharing import ignores_visible_devices


@pytest.mark.parametrize(
    ("strategies", "toolkit_ignores", "expected"),
    [
        pytest.param(["envvar"], False, False, id="the toolkit uses the variable"),
        pytest.param(["envvar"], True, True, id="disabled by the administrator"),
        pytest.param(["volume-mounts"], False, True, id="mounts are preferred"),
        pytest.param(["cdi-annotations", "cdi-cri"], False, True, id="the GPU Operator"),
        pytest.param(["cdi-cri"], False, True, id="the runtime injects devices by itself"),
        pytest.param(["cdi-annotations", "envvar"], True, False, id="depends on the mode"),
        pytest.param([], True, False, id="unknown plugin"),
    ],
)
def test_the_variable_is_ignored_only_if_that_is_certain(
    strategies: list[str], toolkit_ignores: bool, expected: bool
) -> None:
    assert ignores_visible_devices(strategies, toolkit_ignores) is expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param("", False, id="empty: the toolkit's defaults"),
        pytest.param("accept-nvidia-visible-devices-envvar-when-unprivileged = false", True),
        pytest.param('[nvidia-container-runtime]\nmode = "cdi"', False, id="needs a CDI name"),
    ],
)
def test_the_variable_has_an_effect_unless_the_toolkit_is_configured_otherwise(
    config: str, expected: bool
) -> None:
    decoded: dict[str, Any] = tomllib.loads(config)
    assert ignores_environment(decoded) is expected
