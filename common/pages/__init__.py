"""What pages of both sides share: the style, and plots as SVG."""
