"""The node agent: reports what NVML and DCGM measure as the status of a GPUNode."""
