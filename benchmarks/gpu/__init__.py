"""Checks the agent against a real GPU, without Kubernetes: ``make gpu`` (docs/gpu-check.md)."""
