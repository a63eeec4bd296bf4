"""Metrics, the decision journal, and the streams that other processes follow."""
