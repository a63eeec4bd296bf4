"""Builds everything that is published of one commit: `make release`, docs in RELEASING.md."""
