"""Code shared by sites and coordinator. It imports neither."""

import os

# Waiting threads must sleep, not spin: with several processes on one machine, spinning made the
# same training 15 times slower. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
