"""Decides which pods belong together, until when memory is held for them, and when they leave."""
