"""What sites and coordinator share. Knows nothing of either."""
