"""The name under which Flower finds the coordinator's app."""

from fedsurrogate.server_app import serverapp

# An assignment, because Flower reads this file without running it.
app = serverapp.app
