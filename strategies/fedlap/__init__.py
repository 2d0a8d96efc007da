"""FedLAP at the coordinator."""
