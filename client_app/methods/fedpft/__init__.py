"""FedPFT at a site."""
