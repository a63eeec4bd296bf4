"""Where a program cannot be had, the reason is told, and nothing half of it is left behind."""

from pathlib import Path

import pytest

from tests.debian import Unavailable, prometheus


def test_without_apt_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADROOM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match="no prometheus on PATH, and no apt-get"):
        prometheus()


def test_what_apt_says_when_it_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("apt-get", "dpkg"):
        (folder / name).write_text("#!/bin/sh\necho E: no route to any mirror; exit 100\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("HEADROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(Unavailable, match="no route to any mirror"):
        prometheus()
    assert not list((tmp_path / "cache").rglob("usr"))
