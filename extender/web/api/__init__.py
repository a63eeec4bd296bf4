"""The debug API, a module for each group of views; ``debug`` puts them together."""
