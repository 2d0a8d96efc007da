"""Upper limits of received values."""

import math
import re

# Largest number of records of one class at a site. A larger count could only serve to get more
# weight.
LARGEST_COUNT = 100_000_000
# Largest feature; variances are limited by its square. Larger values would overflow and spoil the
# model for all sites.
LARGEST_NUMBER = 1e15
# Largest dimension of features.
LARGEST_DIMENSION = 2**24
# Maximum number of classes in a run; maximum length of the name of a class or a backbone.
MOST_CLASSES, LONGEST_NAME = 10_000, 200
# Longest fingerprint of features whose columns have names.
LONGEST_FINGERPRINT = 2**16
# A site's name becomes a file name at the coordinator.
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Largest parameter of a model that a private run sends to sites. A record's gradient or score does
# not depend on others (client_app/methods/dp/record_chunks.py), but on a GPU the last digit of its
# features may: several images go through the backbone together. Large weights that cancel amplify
# such a digit.
LARGEST_PRIVATE = 1e4


def largest_parameter(private: bool) -> float:
    """The limit of every parameter of a model that is sent to sites."""
    return LARGEST_PRIVATE if private else LARGEST_NUMBER


# A little above a root, so that its rounding does not make a bound too small.
ABOVE = 1 + 1e-12


def norm_of_ones(count: int) -> float:
    """Largest norm of what a record adds that counts once in each of so many histograms."""
    return 1.0 if count == 1 else math.sqrt(count) * ABOVE
