"""Names of classes, patients, sites and columns; and what is left out, and said."""
