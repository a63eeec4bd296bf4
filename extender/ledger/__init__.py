"""The bind protocol: reservations by compare-and-swap on the node's GPUNode."""
