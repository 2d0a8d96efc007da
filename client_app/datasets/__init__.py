"""A site's records: where they come from and how they are read."""
