"""Reading a trace, and error messages that name the file, the column and an example."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.demo.fleet import Shape
from benchmarks.demo.trace import BadTrace, read_shapes, read_workload

NODES = "name,gpu,model,gpu_mem_mib\nn0,2,P100,16280\nn1,8,G2,22731\nn2,2,P100,16280\nc,0,,0\n"
PODS = "name,num_gpu,vram_mib\na,1,-1\nb,1,10456\nc,0,0\nd,8,-1\n"
OPENB = Path(__file__).parents[2].parent / "shared/data/openb"


def test_equal_nodes_become_one_shape_and_nodes_without_a_gpu_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(NODES)
    assert read_shapes(tmp_path) == (Shape("P100", 2, 16280, 2), Shape("G2", 8, 22731, 1))


def test_pods_without_a_gpu_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "pods.csv").write_text(PODS)
    pods = read_workload(tmp_path).pods
    assert sorted((pod.devices, pod.vram_mib or -1) for pod in pods) == [
        (1, -1),
        (1, 10456),
        (8, -1),
    ]


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
            "name,gpu,model\nn,2,T4\n",
            ["nodes.csv", "'gpu_mem_mib'", "15109"],
            id="no such column",
        ),
        pytest.param(
            read_shapes,
            "nodes.csv",
            "gpu,model,gpu_mem_mib\ntwo,T4,15109\n",
            ["nodes.csv line 2", "'gpu'", "'two'", "8"],
            id="a word for a number",
        ),
        pytest.param(
            read_shapes,
            "nodes.csv",
            "gpu,model,gpu_mem_mib\n2,T4,0\n",
            ["nodes.csv line 2", "'gpu_mem_mib'", "'0'", "15109"],
            id="a GPU without memory",
        ),
        pytest.param(
            read_shapes,
            "nodes.csv",
            "gpu,model,gpu_mem_mib\n2,,15109\n",
            ["nodes.csv line 2", "'model'", "T4"],
            id="no model",
        ),
        pytest.param(
            read_shapes,
            "nodes.csv",
            "gpu,model,gpu_mem_mib\n",
            ["nodes.csv", "no node has a GPU"],
            id="no rows",
        ),
        pytest.param(
            read_workload,
            "pods.csv",
            "num_gpu,vram_mib\n1,-2\n",
            ["pods.csv line 2", "'vram_mib'", "'-2'", "10456"],
            id="below the sentinel",
        ),
        pytest.param(
            read_workload,
            "pods.csv",
            "num_gpu,vram_mib\n1\n",
            ["pods.csv line 2", "'vram_mib'", "''", "10456"],
            id="a short row",
        ),
        pytest.param(
            read_workload,
            "pods.csv",
            "num_gpu,vram_mib\n2,512\n",
            ["pods.csv line 2", "'num_gpu'", "'vram_mib'", "2 and -1"],
            id="a share of two GPUs",
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
def test_the_built_in_figures_are_those_of_the_trace() -> None:
    from benchmarks.demo.fleet import PUBLISHED
    from benchmarks.demo.workload import PUBLISHED_PODS, published

    assert set(read_shapes(OPENB)) == set(PUBLISHED)
    trace = read_workload(OPENB)
    assert len(trace.pods) == PUBLISHED_PODS
    ours = published(PUBLISHED_PODS)
    assert ours.whole_gpus == trace.whole_gpus
    assert abs(sum(ours.sharing_mib) - sum(trace.sharing_mib)) * 100 < sum(trace.sharing_mib) * 2
