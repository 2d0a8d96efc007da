"""Whether Flower's own commands work where the Python environment lies: `python -m
fedsurrogate.common.machine.environment_path`.
"""

from __future__ import annotations

import re
import sys

# Ray writes the path of Python into a line for bash, and Flower that of its migrations into a list
# that is split.
UNFIT = re.compile(r"[^\w@+=:./-]")


def environment_remark(prefix: str) -> str:
    """What does not work for an environment in this folder, and what to do.

    Args:
        prefix: The folder of the environment, as in `sys.prefix`.

    Returns:
        One line; empty if everything works there.
    """
    if not (unfit := UNFIT.search(prefix)):
        return ""
    return (
        f"the path of the Python environment, {prefix!r}, contains {unfit.group()!r}: Flower's own "
        "commands, such as `flwr run .` for a simulation and `flower-superlink --database`, fail "
        "there. `coordinator simulate` and `coordinator superlink` work; for the others make the "
        "environment in a folder whose path has letters, digits and -_.@+= only"
    )


if __name__ == "__main__" and (text := environment_remark(sys.prefix)):
    print(f"warning: {text}", file=sys.stderr)
