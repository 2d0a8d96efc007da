"""DP-CVAE at a site."""
