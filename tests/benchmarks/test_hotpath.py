"""Checks on a small fleet that the benchmarks of the hot path measure what they report."""

import msgspec
import pytest

from benchmarks import apart, apart_results
from benchmarks.hotpath import matrix


@pytest.mark.slow
def test_every_case_reports_every_figure() -> None:
    choice = matrix.Choice((12,), (1,), ("small",), matrix.FORMS, matrix.FITS, calls=2)
    found = msgspec.json.decode(matrix.encoded(matrix.results(choice)), type=matrix.Results)
    assert found.schema == matrix.SCHEMA
    assert {"python", "numpy", "msgspec"} <= found.versions.keys()
    cases = [measured.case for measured in found.cases]
    assert [(case.form, case.fits) for case in cases] == [
        (form, fits) for form in ("names", "objects") for fits in ("all", "one", "none")
    ]
    for measured in found.cases:
        verbs = {figures.verb: figures for figures in measured.figures}
        expected = {"filter", "explain", "whatif"}
        if measured.case.fits != "none":
            expected.add("prioritize")
        if measured.case.fits == "all":
            expected.add("bind")
        assert verbs.keys() == expected
        assert (verbs["filter"].request_bytes > 12 * 8_000) == (measured.case.form == "objects")
        for figures in verbs.values():
            assert figures.calls == 2
            assert 0 < figures.took.p50_ms <= figures.took.p99_ms <= figures.took.max_ms
            assert (figures.echo is None) == (figures.verb == "explain")
            if figures.verb in ("filter", "prioritize"):
                assert figures.peak_bytes
                assert figures.blocks_kept is not None
    assert [report.nodes for report in found.reports] == [12]


@pytest.mark.slow
def test_each_part_is_put_under_load_and_calls_are_compared_with_an_echo() -> None:
    found = apart.results(12, pods_per_device=1, seconds=0.5, rounds=1, with_quotas=False)
    assert [of.phase for of in found.phases] == [phase.name for phase in apart.PHASES]
    for of in found.phases:
        assert of.verbs.keys() == set(apart_results.VERBS)
        assert of.calls > 0
        assert of.stalls.samples > 0
        assert of.echo_stalls.samples > 0
        assert of.cpu_ratio.keys() == of.resident_mib.keys() == set(apart_results.PARTS)
    idle, *_ = found.phases
    assert {each.growth_p99 for each in idle.verbs.values()} == {1.0}
    spent = {of.phase: of.cpu_ratio for of in found.phases}
    assert spent["read"]["console"] > spent["idle"]["console"]
    assert spent["flooded"]["webhook"] > spent["idle"]["webhook"]
    assert found.burst_shown_in_s > 0
