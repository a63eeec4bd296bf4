"""The one command that people type: it hands on to parts that know nothing of each other."""
