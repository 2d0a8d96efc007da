"""Columns of other scales and offsets."""
