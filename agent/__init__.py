"""The node agent, which reports the measurements of NVML and DCGM in the status of a GPUNode."""
