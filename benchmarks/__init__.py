"""Benchmarks: one script for each claim. What they share is in `harness`; `gpu` is also a module
for `python -m`.
"""
