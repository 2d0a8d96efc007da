"""Differential privacy: mechanisms, accounting and what a release claims."""
