"""Decisions on record: the journal, and dumps of everything that decisions depend on."""
