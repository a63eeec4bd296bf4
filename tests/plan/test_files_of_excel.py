"""Checks that `headroom plan` reads files of Excel, and names each row that it skips."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from headroom.errors import BadSettings
from headroom.planner.csv_source import read_history
from headroom.planner.report import table
from headroom.planner.workload import History
from tests.deploy.pages import blocks_of
from tests.plan.small_history import FEW, files, run
from tests.plan.test_rows import row, study

__all__ = ["files"]


def as_excel(text: str, separator: str) -> str:
    """Return the file as Excel saves it where the comma is the decimal separator: with decimal
    commas, quoted cells, CRLF, and an empty row below the data.
    """
    head, *lines = text.splitlines()
    rows = [head.replace(",", separator)]
    for line in lines:
        name, *cells = line.split(",")
        cells = [cell.replace(".", ",") for cell in cells]
        rows.append(separator.join([f'"{name}"', *cells]))
    empty = separator * head.count(",")
    return "\r\n".join([*rows, empty, ""])


def history(pods: Path, nodes: Path) -> History:
    found = read_history(pods, nodes)
    assert found.skipped == ()
    return found


@pytest.mark.parametrize(
    ("separator", "encoding"),
    [(";", "utf-8-sig"), (";", "utf-8"), ("\t", "utf-16")],
    ids=["CSV UTF-8", "CSV", "Unicode text"],
)
def test_files_of_excel_are_read_like_others(
    files: tuple[Path, Path], separator: str, encoding: str
) -> None:
    expected = history(*files)
    assert expected.lives[0].sm_ratio == 0.25
    for file in files:
        text = as_excel(file.read_text(), separator)
        file.write_text(text, encoding=encoding, newline="")
    assert history(*files) == expected


def test_commas_with_a_byte_order_mark_and_quotes(files: tuple[Path, Path]) -> None:
    expected = history(*files)
    pods, _ = files
    text = (
        pods.read_text().replace("web-0-0", '"web-0-0"').replace("name,workload", "name, workload")
    )
    pods.write_text(text, encoding="utf-8-sig")
    assert history(*files) == expected


def test_a_pipe_is_read(files: tuple[Path, Path], tmp_path: Path) -> None:
    expected, (pods, nodes), pipe = history(*files), files, tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[pods.read_bytes()], daemon=True)
    writer.start()
    assert history(pipe, nodes) == expected
    writer.join(timeout=10)


def test_times_can_have_fractions_or_be_dates(files: tuple[Path, Path]) -> None:
    pods, _ = files
    text = pods.read_text()
    pods.write_text(text.replace(",0,0,3000", ",0,0.5,3000.25", 1))
    assert history(*files).lives[0].run_s == 2999.75
    head, line, *_ = text.splitlines()
    dates = ("2026-11-28T18:30:00Z", "2026-11-28T19:30:05+01:00", "2026-11-28 19:20:00Z")
    pods.write_text(f"{head}\n{line.removesuffix(',0,0,3000')},{','.join(dates)}\n")
    (life,) = history(*files).lives
    assert (life.created_s, life.run_s) == (0.0, 50 * 60 - 5.0)


def test_skipped_rows_are_named_with_the_reason(files: tuple[Path, Path]) -> None:
    pods, nodes = files
    expected = history(*files)
    running = "".join(f"running-{n},web,1,-1,5120,0.25,10,20,\n" for n in range(7))
    pods.write_text(
        f"{pods.read_text()}{running}waits,web,1,-1,,,10,,\ncpu-only,etl,0,,,,10,20,30\n"
    )
    nodes.write_text(nodes.read_text() + "cpu-1,0,,\n")
    found = read_history(pods, nodes)
    assert found.skipped == (
        "Skipped 1 pod that never started: waits (line 59).",
        "Skipped 7 pods without an end time: running-0 (line 52), running-1 (line 53), running-2 "
        "(line 54), running-3 (line 55), running-4 (line 56) and 2 more.",
        "To count a pod that still runs, write the time at which you made the file into "
        "deletion_time.",
    )
    assert found.assumptions[:3] == (
        "Skipped 1 pod without a GPU: cpu-only (line 60).",
        "The CPU and host memory that skipped pods used count as free.",
        "Skipped 1 node without a GPU: cpu-1 (line 7).",
    )
    assert replace(found, skipped=(), assumptions=expected.assumptions) == expected
    few = (*FEW, "--vram", "peaks")
    sentences = json.loads(run(files, *few)[1])["sentences"]
    assert sentences[1:4] == list(found.skipped)


def test_a_column_that_is_not_read_is_named_with_the_column_that_is_missing(
    files: tuple[Path, Path],
) -> None:
    pods, nodes = files
    text = pods.read_text()
    pods.write_text(text.replace("peak_mib", "Spitze", 1))
    (named,) = read_history(pods, nodes).skipped
    assert named.startswith(
        "Skipped 1 column of pods.csv: 'Spitze'. Columns that it lacks: peak_mib"
    )
    few = FEW
    first, second, *_ = json.loads(run(files, *few)[1])["sentences"]
    assert first.endswith("(5 nodes); none has a measured peak.")
    assert second == named
    pods.write_text(text.replace("peak_mib", "Peak MiB", 1))
    assert "'Peak MiB' (did you mean peak_mib?)" in read_history(pods, nodes).skipped[0]
    # Columns of the published trace are known, although they are not needed.
    pods.write_text(text.replace(",sm_ratio", ",qos", 1))
    assert read_history(pods, nodes).skipped == ()
    pods.write_text(text)
    nodes.write_text("\n".join(f"{line},1" for line in nodes.read_text().splitlines()))
    nodes.write_text(nodes.read_text().replace("gpu_mem_mib,1", "gpu_mem_mib,CPU_milli", 1))
    (named,) = read_history(pods, nodes).skipped
    assert named.startswith("Skipped 1 column of nodes.csv: 'CPU_milli' (did you mean cpu_milli?).")


def test_a_column_that_exists_twice_is_rejected(files: tuple[Path, Path]) -> None:
    pods, nodes = files
    pods.write_text(pods.read_text().replace("vram_mib", "peak_mib", 1))
    with pytest.raises(BadSettings, match=r"line 1: column peak_mib exists 2 times; remove or"):
        read_history(pods, nodes)


@pytest.mark.parametrize(
    ("old", "new", "example"),
    [
        ("5120,0.25,0", "7.235,0.25,0", "7235"),
        ("5120,0.25,0", "5120,22 %,0", "0.22"),
        ("0.25,0,0,3000", "0.25,29.11.2026 8:30,0,3000", "2026-11-29 08:30:00"),
    ],
)
def test_numbers_and_dates_as_excel_formats_them_are_rejected_with_the_correction(
    files: tuple[Path, Path], old: str, new: str, example: str
) -> None:
    pods, nodes = files
    pods.write_text(pods.read_text().replace(old, new, 1))
    with pytest.raises(BadSettings) as found:
        read_history(pods, nodes)
    assert " is not a" in str(found.value)
    assert str(found.value).partition(" Example: ")[2].partition(",")[0] == example


def test_each_column_of_the_report_is_explained() -> None:
    page = Path("docs/how-to/plan.md").read_text()
    heading, *_ = table(study(row("predicted", 4, 4)), {"L4": 1.0})
    explained = [line.split("|")[1].strip() for line in page.splitlines() if line[:3] == "| `"]
    assert {f"`{each}`" for each in heading[1:]} - {*explained} == set()
    assert "`yyyy-mm-dd hh:mm:ss`" in page


def test_if_no_row_is_left_the_error_names_the_skipped_rows(files: tuple[Path, Path]) -> None:
    pods, nodes = files
    head, line, *_ = pods.read_text().splitlines()
    pods.write_text(f"{head}\n{line.removesuffix('3000')}\n")
    with pytest.raises(
        BadSettings,
        match=r"that ran and ended. Skipped 1 pod without an end time: web-0-0 \(line 2\)",
    ):
        read_history(pods, nodes)


def test_a_peak_above_every_gpu_is_named_and_refused_if_no_pod_is_left(
    files: tuple[Path, Path],
) -> None:
    pods, _ = files
    head, first, second, *_ = pods.read_text().splitlines()
    few = ("--replicas", "4", "--device-choice", "counting", "--seeds", "1")
    pods.write_text("\n".join([head, first.replace("5120", "900000"), second]) + "\n")
    code, text, error = run(files, *few, "--json")
    assert (code, error) == (0, "")
    assert json.loads(text)["sentences"][1] == (
        "1 pod fits on no node of the cluster and is left out: web-0-0 (878.9 GiB on a GPU, but "
        "the largest has 22.5 GiB)."
    )
    pods.write_text("\n".join([head, first.replace("5120", "900000")]) + "\n")
    assert run(files, *few) == (
        2,
        "",
        "headroom: no pod of the history fits on a node of the cluster: web-0-0 (878.9 GiB on a "
        "GPU, but the largest has 22.5 GiB)\n",
    )


def test_a_request_above_every_gpu_does_not_hide_what_unshared_gpus_need(
    files: tuple[Path, Path],
) -> None:
    pods, _ = files
    pods.write_text(pods.read_text().replace(",-1,5120,", ",24000,5120,"))
    few = (*FEW, "--vram", "requests")
    rows = json.loads(run(files, *few)[1])["configurations"]
    assert [each["replays"][0]["gpus"] for each in rows] == [6, 6]


@pytest.mark.slow
def test_the_example_files_give_the_documented_report() -> None:
    (block,) = blocks_of("how-to/plan.md", "example")
    command, *shown = block.text.splitlines()
    prompt, program, plan, *options = command.split()
    assert (prompt, program, plan) == ("$", "headroom", "plan")
    at = {name: value for name, value in zip(options[::2], options[1::2], strict=True)}
    given = Path(at.pop("--pods")), Path(at.pop("--machines"))
    code, text, error = run(given, *(part for pair in at.items() for part in pair))
    assert (code, error) == (0, "")
    assert shown[-1] == "..."
    assert text.splitlines()[: len(shown) - 1] == shown[:-1]
