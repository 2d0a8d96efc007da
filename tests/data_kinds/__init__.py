"""Data and machines as hospitals have them, in forms that once went wrong."""
