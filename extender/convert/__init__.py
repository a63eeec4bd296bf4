"""Turns manifests written for KAI, HAMi or gpushare into ours, and says what cannot be carried."""
