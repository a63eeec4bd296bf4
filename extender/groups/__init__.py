"""Binds the pods of a group together, and evicts groups of which only a part is bound."""
