"""FedAvg and its relatives at the coordinator."""
