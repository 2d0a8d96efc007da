"""The ClientApp of fedsurrogate, as it is."""

from client_app.app import app

__all__ = ["app"]
