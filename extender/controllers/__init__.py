"""Background loops: each module watches the state and acts on one subject."""
