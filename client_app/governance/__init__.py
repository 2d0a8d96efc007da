"""What may leave a site: policy, budget, gate and ledger."""
