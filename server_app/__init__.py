"""The coordinator."""

from server_app.app import app

__all__ = ["app"]
