"""What sites release, as types: mixtures, class sums, synthetic records."""
