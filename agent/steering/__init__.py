"""Steering, which makes the device plugin's preferred allocation follow the ledger."""
