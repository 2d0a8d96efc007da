"""Before and after a run: checks that need no process, resuming, and interruption."""
