"""Checks that a site can take part."""
