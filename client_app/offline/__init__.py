"""Sites without a network connection: bundles, keys, dry runs."""
