"""The state of the cluster in memory, which applies changes and returns effects and immutable
snapshots."""
