"""Canonical bytes: what travels, and the checks it passes on arrival."""
