"""Data and machines as hospitals have them."""
