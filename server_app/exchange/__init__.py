"""Runs whose messages are carried as files, for sites without a network connection."""
