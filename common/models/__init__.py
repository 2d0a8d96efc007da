"""Models: frozen backbones, heads, networks and generators."""
