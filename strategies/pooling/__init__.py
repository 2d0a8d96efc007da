"""Several sites' statistics as one, weighed or robustly."""
