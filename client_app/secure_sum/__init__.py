"""Secure sums at a site: its keys, its shares, its masked vector, and what it reveals at the end."""
