"""The `coordinator` command."""
