"""Helpers of benchmarks with the real kube-scheduler: a control plane, a fleet, and pods."""
