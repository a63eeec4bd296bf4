"""The ledger: reservations, written by compare-and-swap on the GPUNode of each node."""
