"""Certificates without cert-manager: made, renewed in time, trusted before they are shown."""
