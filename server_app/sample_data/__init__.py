"""Small data sets that are made here, for tutorials and first steps; no patient is in them."""
