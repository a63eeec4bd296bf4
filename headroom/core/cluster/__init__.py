"""The cluster in memory: takes changes, returns effects and immutable snapshots."""
