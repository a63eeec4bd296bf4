"""The journal of decisions, and dumps of all inputs of decisions."""
