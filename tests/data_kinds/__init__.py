"""Data as hospitals and users have them, in forms that once went wrong."""
