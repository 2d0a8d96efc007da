"""Frozen feature extractors: names, loading, preprocessing, the power of their features."""
