"""The last hour of devices and pods: recorded, handed over, and read from Prometheus."""
