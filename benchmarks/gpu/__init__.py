"""Checks the agent against a real GPU, without Kubernetes: ``make gpu``
(docs/operate/gpu-check.md)."""
