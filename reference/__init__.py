"""Generates the pages of docs/reference that describe the product, from its code and manifests.

``python -m reference`` writes all pages, and `make docs` calls it. Each page has a module with a
pure function that returns the page's text.
"""
