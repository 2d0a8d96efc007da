"""The largest values that anything may have that comes from elsewhere."""

# No site has more records of one class than this; a larger count would only buy more weight.
LARGEST_COUNT = 100_000_000
# Larger features, or variances beyond its square, would overflow while learning and take every other site's part along.
LARGEST_NUMBER = 1e15
# No run has more classes, and no name of a class or a backbone is longer.
MOST_CLASSES, LONGEST_NAME = 10_000, 200
