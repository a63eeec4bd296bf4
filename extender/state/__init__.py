"""The cluster in memory: changes in, effects and immutable snapshots out. No I/O."""
