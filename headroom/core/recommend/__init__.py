"""Recommendations of GPU memory from the peaks of past lives.

A *life* is one container on one device, from its start to its end. ``histogram`` keeps the peaks of
lives with decaying weights, ``lives`` decides which lives count, ``programs`` recognizes programs,
``estimate`` computes a request, and ``profile`` combines them for one owner. All modules are pure,
and get times as arguments in seconds since the epoch.
"""
