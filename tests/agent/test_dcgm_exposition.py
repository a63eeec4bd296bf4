"""Tests that metrics of all versions of dcgm-exporter are parsed, and that invalid lines are
skipped.
"""

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.probes.dcgm_exposition import DcgmReading, Exposition, last_xids
from tests.agent.exporter import parse, recorded

MIB = 1 << 20


def test_version_3_without_profiling_counters() -> None:
    readings, bad = parse(recorded("3.3.5-3.4.0"))
    assert bad == 0
    assert readings == [
        DcgmReading("GPU-a", None, xid=0),
        DcgmReading("GPU-b", None, xid=0),
    ]


def test_mig_series_are_distinguished_by_their_instance() -> None:
    readings, bad = parse(recorded("4.2.3-4.1.3-mig"))
    assert bad == 0
    shown = {(r.uuid, r.gpu_instance): (r.sm_ratio, r.occupancy_ratio) for r in readings}
    assert shown == {("GPU-a", 1): (0.0, 0.0), ("GPU-a", 2): (0.713002, 0.302001)}


def test_instances_do_not_hide_each_others_xids() -> None:
    line = 'DCGM_FI_DEV_XID_ERRORS{{UUID="{}",GPU_I_ID="{}"}} {}\n'
    readings, _ = parse(
        line.format("GPU-a", 1, 94)
        + line.format("GPU-a", 2, 79)
        + 'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a"} 31\n'
        + line.format("GPU-foreign", 1, 48)
    )
    assert last_xids(readings, {"GPU-a"}) == {"GPU-a/1": 94, "GPU-a/2": 79, "GPU-a": 31}


def test_series_of_pods_that_share_a_device_are_not_summed() -> None:
    (reading,), bad = parse(recorded("4.5.3-4.8.2-shared"))
    assert bad == 0
    assert reading == DcgmReading(
        "GPU-a",
        None,
        sm_ratio=0.425,
        engine_ratio=0.714,
        xid=31,
    )


def test_a_blank_value_of_dcgm_is_absent_and_not_a_fault() -> None:
    readings, bad = parse(recorded("2.1.4-2.3.1-blanks"))
    assert bad == 0
    assert readings == [DcgmReading("GPU-b", None, xid=0, sm_ratio=0.5)]


def test_an_instance_is_separate_from_its_gpu_in_the_first_version_with_mig() -> None:
    readings, bad = parse(recorded("2.1.8-2.4.0-mig"))
    assert bad == 0
    assert [(r.gpu_instance, r.sm_ratio) for r in readings] == [(None, 0.13), (13, 0.91)]


def test_ratios_are_not_percentages_despite_the_help_text_and_empty_labels_name_no_pod() -> None:
    readings, bad = parse(recorded("3.0-3.1-mig"))
    assert bad == 0
    shown = [(r.gpu_instance, r.engine_ratio, r.sm_ratio) for r in readings]
    assert shown == [(7, 0.999917, None), (5, 0.000036, None)]


def test_renamed_labels_are_recognised() -> None:
    readings, bad = parse(recorded("4.6.0-renamed"))
    assert bad == 0
    assert [(r.uuid, r.sm_ratio, r.xid) for r in readings] == [
        ("GPU-a", 0.0, 0),
        ("GPU-b", 0.8841, 79),
    ]


def test_names_and_units_since_version_4_9_are_recognised() -> None:
    readings, bad = parse(recorded("4.9.0-new-names"))
    assert bad == 0
    assert readings == [
        DcgmReading(
            "GPU-a",
            None,
            sm_ratio=0.0,
            occupancy_ratio=0.0,
            engine_ratio=0.0,
            xid=0,
        ),
        DcgmReading(
            "GPU-b",
            None,
            sm_ratio=0.8841,
            occupancy_ratio=0.412,
            engine_ratio=0.991002,
            xid=79,
        ),
    ]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} NaN', id="not a number"),
        pytest.param('DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} -0.5', id="negative"),
        pytest.param('DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} 57', id="percent"),
        pytest.param('DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a"} 1e309', id="infinite"),
        pytest.param('DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a"} 7.5', id="a fractional XID"),
        pytest.param('DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a"} text', id="no value"),
        pytest.param('DCGM_FI_DEV_XID_ERRORS{gpu="0"} 5', id="no device"),
        pytest.param('DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a",GPU_I_ID="x"} 5', id="no instance"),
        pytest.param('DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a', id="truncated"),
        pytest.param("DCGM_FI_DEV_XID_ERRORS{, =1} 5", id="invalid label"),
    ],
)
def test_an_invalid_line_is_skipped_and_hides_no_other(line: str) -> None:
    readings, bad = parse(f'{line}\nDCGM_FI_DEV_XID_ERRORS{{UUID="GPU-b"}} 7\n')
    assert [r for r in readings if r.uuid == "GPU-b"] == [DcgmReading("GPU-b", None, xid=7)]
    assert not [r for r in readings if r.uuid == "GPU-a"]
    assert bad == 1


def test_a_too_long_line_is_skipped_and_counted() -> None:
    long = 'DCGM_FI_DEV_XID_ERRORS{{UUID="GPU-{}",pod="{}"}} 7\n'
    text = "".join(long.format(*each) for each in (("a", ""), ("b", "x" * (1 << 20)), ("c", "")))
    readings, bad = parse(text + "# " + "x" * (1 << 20))
    assert [r.uuid for r in readings] == ["GPU-a", "GPU-c"]
    assert bad == 2


def test_a_large_exposition_takes_little_memory() -> None:
    """An exposition may have 15 MiB, but the complete text is never in memory."""
    line = 'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a",pod="%s",namespace="%s"} %d\n'
    part = "".join(line % ("p" * 60, "n" * 60, i) for i in range(400)).encode()
    count = (15 << 20) // len(part)
    exposition = Exposition()
    tracemalloc.start()
    try:
        for _ in range(count):
            exposition.feed(part)
        scraped = exposition.end()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scraped.readings == (DcgmReading("GPU-a", None, xid=399),)
    assert peak_bytes < MIB


def test_the_number_of_devices_in_an_exposition_is_limited() -> None:
    line = 'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-%s"} 1\n'
    readings, bad = parse("".join(line % i for i in range(20_000)))
    assert (len(readings), bad) == (16 << 10, 20_000 - (16 << 10))


METRIC = st.sampled_from(
    ["DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_DEV_XID_ERRORS"]
)
LABELS = st.text(alphabet='GPU-aUID_="{},\\\n# 1é\x00', max_size=30)


@given(st.lists(st.tuples(METRIC, LABELS, st.floats() | st.text(max_size=5)), max_size=8))
def test_no_input_of_an_exporter_raises_an_error(lines: list[tuple[str, str, object]]) -> None:
    readings, _ = parse("\n".join(f"{n}{{{labels}}} {v}" for n, labels, v in lines))
    for reading in readings:
        assert reading.sm_ratio is None or 0 <= reading.sm_ratio <= 1
        assert reading.xid is None or reading.xid >= 0
        assert reading.uuid


def test_nan_never_becomes_a_ratio() -> None:
    (reading,), _ = parse('DCGM_FI_PROF_SM_ACTIVE{UUID="a"} 1.004\n')
    assert reading.sm_ratio == 1.0
    assert not math.isnan(reading.sm_ratio)
