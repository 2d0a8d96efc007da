"""Simulation, SuperLink, certificates and keys, and site kits."""

# Days for which a new certificate of the coordinator is valid. It stands here, so that help shows
# it without cryptography.
SERVER_DAYS = 397
