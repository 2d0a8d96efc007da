"""The name under which Flower finds a site's app."""

from fedsurrogate.client_app import clientapp

# An assignment, because Flower reads this file without running it.
app = clientapp.app
