"""What sites and coordinator share. Knows nothing of either."""

import os

# Threads that wait for each other must sleep, not spin: with several processes on a machine spinning made the same
# training 15 times slower. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
