"""Checks that a failed download of a program is reported and leaves no partial files."""

from pathlib import Path

import pytest

from tests.debian import Unavailable, prometheus


def test_an_error_of_apt_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
