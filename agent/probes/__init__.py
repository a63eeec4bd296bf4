"""Probes: what NVML, DCGM, the kubelet and /proc report about this node."""
