"""Demonstrates Headroom without a cluster: four pods on one GPU, then a simulated GPU fleet."""

from benchmarks.demo.show import run

__all__ = ["run"]
