"""Runs that count records at the sites: evaluations of a model, and surveys."""
