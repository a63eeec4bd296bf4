"""Tests that a trace is read, and that errors name the file and the column and show an example."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.demo.trace import BadTrace, read_shapes, read_workload

OPENB = Path(__file__).parents[2].parent / "shared/data/openb"


@pytest.mark.parametrize(
    ("read", "file", "text", "says"),
    [
        pytest.param(
            read_shapes,
            "nodes.csv",
            None,
            ["nodes.csv", "No such file", "gpu_mem_mib"],
            id="no file",
        ),
        pytest.param(
            read_shapes,
            "nodes.csv",
            "gpu,model,gpu_mem_mib\ntwo,T4,15109\n",
            ["nodes.csv line 2", "'gpu'", "'two'", "8"],
            id="a word instead of a number",
        ),
        pytest.param(
            read_workload,
            "pods.csv",
            "num_gpu,vram_mib\n1,-2\n",
            ["pods.csv line 2", "'vram_mib'", "'-2'", "10456"],
            id="below the sentinel",
        ),
    ],
)
def test_an_invalid_file_raises_with_file_column_and_example(
    tmp_path: Path,
    read: Callable[[Path], object],
    file: str,
    text: str | None,
    says: list[str],
) -> None:
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(BadTrace) as raised:
        read(tmp_path)
    for words in says:
        assert words in str(raised.value)


@pytest.mark.skipif(not OPENB.is_dir(), reason="the research trace stays out of the repository")
def test_the_built_in_figures_equal_the_trace() -> None:
    from benchmarks.demo.fleet import PUBLISHED
    from benchmarks.demo.workload import PUBLISHED_PODS, published

    assert set(read_shapes(OPENB)) == set(PUBLISHED)
    trace = read_workload(OPENB)
    assert len(trace.pods) == PUBLISHED_PODS
    ours = published(PUBLISHED_PODS)
    assert ours.whole_gpus == trace.whole_gpus
    assert abs(sum(ours.sharing_mib) - sum(trace.sharing_mib)) * 100 < sum(trace.sharing_mib) * 2
