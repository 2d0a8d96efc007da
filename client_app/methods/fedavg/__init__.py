"""FedAvg and its relatives at a site."""
