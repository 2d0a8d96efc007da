"""DP-CVAE at the coordinator."""
