"""Builds everything that is published for a commit. `make release` calls it; see RELEASING.md."""
