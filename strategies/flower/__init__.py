"""Flower's interface to every strategy: its methods, its `Result`, and its records of arrays and metrics."""
