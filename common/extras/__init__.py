"""Packages that come with an extra of fedsurrogate: which extra has which, and one error where one
is missing.
"""
