"""Composition roots: the commands, and one module for each process that assembles its parts."""
