"""Names of classes, patients, sites and columns; and the report of what is left out."""
