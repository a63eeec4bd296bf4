"""Checks that each benchmark starts, including benchmarks that no test runs."""

import importlib
import pkgutil

import benchmarks


def test_every_benchmark_can_be_imported() -> None:
    modules = [each.name for each in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    assert len(modules) > 20
    for module in modules:
        importlib.import_module(module)
