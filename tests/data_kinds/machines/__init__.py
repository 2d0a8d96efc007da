"""Settings, folders and variables as users and clusters set them."""
