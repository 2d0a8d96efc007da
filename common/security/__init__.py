"""Keys, signatures and sealing."""
