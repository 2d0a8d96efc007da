"""What every strategy shares: asking sites, checking replies, rounds, outcome."""
