"""Secure aggregation at the coordinator: keys, shares, masked vectors, the list of summed sites, and the
sum.
"""
