"""The ClientApp of fedsurrogate, unchanged."""

from fedsurrogate.client_app.clientapp import app

__all__ = ["app"]
