"""Recommendations of GPU memory from the peaks of past lives.

A *life* is one container on one device, from its start to its end. ``histogram`` has the peaks of
lives with decaying weights, ``lives`` which lives count, ``programs`` what is known about the
program, ``estimate`` the recommendation, ``profile`` all of it for one owner. All of it is pure:
times are arguments, in seconds since the epoch.
"""
