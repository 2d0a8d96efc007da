"""Flower's interface to all strategies: the methods, the `Result`, and the records of arrays and
metrics.
"""
