"""The logs of processes that run for long."""
