"""FedLAP at a site."""
