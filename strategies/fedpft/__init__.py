"""FedPFT at the coordinator."""
