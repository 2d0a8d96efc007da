"""Defences against hostile sites."""
