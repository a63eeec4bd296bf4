"""Binds the pods of a group together, and evicts groups that are bound only in part."""
