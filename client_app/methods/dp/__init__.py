"""Gradients of single records, clipped and summed with noise."""
