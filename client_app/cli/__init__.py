"""The `site` command."""
