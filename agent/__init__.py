"""The node agent: what NVML and DCGM really measure, reported as a GPUNode's status."""
