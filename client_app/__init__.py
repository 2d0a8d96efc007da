"""Site code."""
