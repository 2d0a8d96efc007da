"""The checks of a site's connection, made by a process of its own: gRPC starts threads, and whoever
asks forks others, or has no threads of it yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.client_app.processes.own_account import unseen
from fedsurrogate.common.flower.environment import QUIET

LOOK_SECONDS = 120.0


def look_at_link(link: Sequence[str]) -> list[Finding]:
    """What `site doctor --link-only` finds.

    Args:
        link: its options that name the coordinator, the certificate and the key.

    Raises:
        OSError, ValueError, TypeError, subprocess.TimeoutExpired: nothing could be found out.
    """
    site = str(Path(sys.executable).with_name("site"))
    done = subprocess.run(
        [site, "doctor"],
        env=os.environ | QUIET | unseen(["--link-only", "--json", *link]),
        capture_output=True,
        text=True,
        timeout=LOOK_SECONDS,
        check=False,
    )
    return [Finding(**row) for row in json.loads(done.stdout)]
