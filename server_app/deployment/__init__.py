"""Simulation, SuperLink, certificates and kits."""
