"""Heads for numbers, labels and times, from sums over coded records. No Flower types, no settings."""
