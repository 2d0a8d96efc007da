"""Pictures of a run: plain data in, one SVG text out."""
