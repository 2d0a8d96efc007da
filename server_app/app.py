"""The name under which Flower finds the coordinator's app."""

from . import serverapp

# An assignment, because Flower reads this file without running it.
app = serverapp.app
