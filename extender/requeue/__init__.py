"""Requeues rejected pods that fit now."""
