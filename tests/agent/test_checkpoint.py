"""Tests broken, old and very large checkpoints, and tests when the agent reads a checkpoint
again.
"""

import base64
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.probes import checkpoint
from agent.probes.checkpoint import BadCheckpoint, parse_checkpoint, watched
from agent.probes.kubelet import KubeletProbe
from agent.probes.protobuf import BadMessage, fields, text
from agent.probes.readings import AnswerReading, HoldingReading, SourceReading
from tests.agent.records import entry, record
from tests.waiting import until


def parsed(file: dict[str, Any]) -> Any:
    return parse_checkpoint(json.dumps(file).encode())


def test_devices_are_read_from_every_numa_node_and_from_the_old_plain_list() -> None:
    by_numa = entry(DeviceIDs={"0": ["a"], "1": ["b", "a"], "2": None})
    plain, none = entry(DeviceIDs=["b", "a"]), entry(DeviceIDs=None)
    replicas = [each.replicas for each in parsed(record(by_numa, plain, none)).entries]
    assert replicas == [("a", "b"), ("a", "b"), ()]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"Data": {"PodDev', id="truncated"),
        pytest.param(b"[]", id="another format"),
        pytest.param(b'{"Data": null, "Checksum": 1}', id="no data"),
        pytest.param(b"\xff\xfe", id="not text"),
        pytest.param(b'{"Data":' * 100_000, id="nested too deeply"),
    ],
)
def test_an_invalid_checkpoint_is_rejected_with_one_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint):
        parse_checkpoint(content)
    file = tmp_path / "checkpoint"
    file.write_bytes(content)
    probe = KubeletProbe(file, tmp_path / "no socket")
    rows = {r.source: r for r in probe.read() if isinstance(r, SourceReading)}
    assert rows["checkpoint"].state == "degraded"


def test_text_that_is_not_utf8_is_rejected() -> None:
    with pytest.raises(BadMessage, match="not UTF-8"):
        text(b"\xff")


@given(st.binary())
def test_the_parsers_raise_no_other_error_for_any_bytes(content: bytes) -> None:
    for parse, rejection in (
        (parse_checkpoint, BadCheckpoint),
        (lambda c: [*fields(c)], BadMessage),
    ):
        with contextlib.suppress(rejection):
            parse(content)


def test_at_most_64_mib_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    content = json.dumps(record(entry())).encode()
    for spaces, read in ((64 << 20) - len(content), True), ((64 << 20) - len(content) + 1, False):
        file.write_bytes(b" " * spaces + content)
        found = list(KubeletProbe(file, tmp_path / "no socket").read())
        assert any(isinstance(reading, HoldingReading) for reading in found) is read


def test_the_plugins_response_shows_its_configuration(tmp_path: Path) -> None:
    # The response contains two environment variables and one CDI device.
    def pair(number: int, *texts: str) -> bytes:
        inner = b"".join(
            bytes([i << 3 | 2, len(text)]) + text.encode() for i, text in enumerate(texts, 1)
        )
        return bytes([number << 3 | 2, len(inner)]) + inner

    answer = (
        pair(1, "NVIDIA_VISIBLE_DEVICES", "void")
        + pair(1, "CUDA_MPS_PIPE_DIRECTORY", "/mps")
        + pair(4, "cdi.k8s.io/nvidia-device-plugin_u", "k8s.device-plugin.nvidia.com/gpu=GPU-a")
        + pair(5, "k8s.device-plugin.nvidia.com/gpu=GPU-a")
    )
    file = tmp_path / "checkpoint"
    file.write_text(json.dumps(record(entry(AllocResp=base64.b64encode(answer).decode()))))
    found = list(KubeletProbe(file, tmp_path / "no socket").read())
    (shown,) = [r for r in found if isinstance(r, AnswerReading)]
    assert shown.strategies == {"cdi-annotations", "cdi-cri"}
    assert shown.mps


def test_a_replaced_checkpoint_triggers_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHECK_EVERY_S", 0.01)
    changed = threading.Event()
    folder = tmp_path / "device-plugins"
    file = folder / "checkpoint"
    with watched(file, changed.set):
        folder.mkdir()  # The kubelet starts for the first time.
        for content in ("one", "two"):
            other = tmp_path / "new"
            other.write_text(content)
            other.rename(file)
            until(changed.is_set, "a change")
            changed.clear()
        folder.rename(tmp_path / "old")
        folder.mkdir()
        until(changed.is_set, "that the record is gone")
        changed.clear()
        file.write_text("three")
        until(changed.is_set, "a change")
