"""Files that import what only Flower 1.34 has are not collected with another."""

import flwr

collect_ignore = (
    [] if flwr.__version__.startswith("1.34") else ["test_rounds.py", "test_rounds_attacks.py"]
)
