"""The last hour of devices and pods, which the console records, and older values in Prometheus."""
