"""Features of a site's records: extraction, cache and what a task receives."""
