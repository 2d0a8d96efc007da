"""Benchmarks: scripts, of which `python -m benchmarks.gpu` is also a module."""
