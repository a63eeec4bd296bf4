"""The ledger of reservations, which are written by compare-and-swap on the GPUNode of each node."""
