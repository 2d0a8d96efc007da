"""Secure aggregation: a coordinator learns the sum of the sites' vectors and nothing else about any of
them.
"""
