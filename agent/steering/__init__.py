"""The device that the ledger chose is the one that the kubelet takes: `steered` nodes."""
