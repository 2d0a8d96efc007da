"""A Flower app with a ServerApp of its own, and the ClientApp of fedsurrogate."""
