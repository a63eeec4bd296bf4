"""What becomes of pods, and of what makes pods, when they are created: pure decisions."""
