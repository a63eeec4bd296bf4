"""Converts manifests written for KAI, HAMi or gpushare, and reports what cannot be converted."""
