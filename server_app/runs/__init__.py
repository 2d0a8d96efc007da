"""A run: its plan, state and folder."""
