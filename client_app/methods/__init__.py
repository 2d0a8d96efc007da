"""What a site computes for each method."""
