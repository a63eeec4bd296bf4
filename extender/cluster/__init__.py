"""Deterministic state in memory: events in, immutable snapshots out, one place that mutates."""
