"""Messages of a run as signed files, which people carry."""
