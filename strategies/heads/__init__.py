"""Heads that sites train alone, combined at the coordinator."""
