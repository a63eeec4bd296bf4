"""The bind protocol: promises by compare-and-swap on the node's GPUNode, over a store seam."""
