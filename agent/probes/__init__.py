"""Probes, which read this node's state from NVML, DCGM, the kubelet, /proc and the API server."""
