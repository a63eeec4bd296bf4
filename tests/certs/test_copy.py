"""Tests that the files of a mounted Secret are copied to a host completely, privately and
in time.
"""

from pathlib import Path

import structlog
import typer
from typer.testing import CliRunner

from headroom.certs.commands import copy, copy_certs

FILES = ("ca.crt", "tls.crt", "tls.key")
#: An app with only this command, because the complete app configures logging for the whole process.
app = typer.Typer()
app.command()(copy_certs)


def test_files_are_copied_completely_and_readable_only_by_their_owner(tmp_path: Path) -> None:
    source, target = tmp_path / "secret", tmp_path / "host"
    source.mkdir()
    target.mkdir()
    with structlog.testing.capture_logs() as logs:
        assert not copy(source, target)
    assert [line["event"] for line in logs] == ["certificate_not_copied"] * len(FILES)
    for name in FILES:
        (source / name).write_text(f"first {name}")
    assert copy(source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o600}
    before = {path.name: path.stat().st_ino for path in target.iterdir()}
    (source / "tls.crt").write_text("second")
    assert CliRunner().invoke(app, [str(source), str(target), "--once"]).exit_code == 0
    after = {path.name: path.stat().st_ino for path in target.iterdir()}
    assert [name for name in FILES if before[name] != after[name]] == ["tls.crt"]
    assert (target / "tls.crt").read_text() == "second"
    (source / "tls.crt").unlink()
    gone = CliRunner().invoke(app, [str(source), str(target), "--once"])
    assert gone.exit_code == 1
    assert (target / "tls.crt").read_text() == "second"
