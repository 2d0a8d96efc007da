"""Attacks on a site's own release, before it leaves."""
