"""The coordinator's app: the installed one runs, whatever a run brings, and a SuperLink takes no run
of another.

Flower sends an app's code with each run. Whoever reaches the SuperLink could so run code of his own
in the coordinator's name, next to its keys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET, without_proxy_here
from fedsurrogate.common.logs.output import configure_log
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.deployment.audit_log import note
from fedsurrogate.server_app.deployment.control import facts_of_run
from fedsurrogate.server_app.deployment.submit import app_folder, folder_to_pack

# This interpreter, which looks for no module in the current folder.
PYTHON = (sys.executable, "-P", "-m")
TASK = (*PYTHON, __name__)
COORDINATOR = (*PYTHON, "fedsurrogate.server_app.cli.main")


def serve(runtime: str, parent: int | None = None) -> None:
    """Start the installed app for every run of a SuperLink. Does not return.

    Args:
        runtime: Address of the SuperLink's API for its apps: unix:/path.
        parent: Id of the process with which this one ends; None: it ends by itself.
    """
    os.environ.update(QUIET | dict(os.environ) | without_proxy_here(os.environ))
    configure_log(os.environ)
    flower().coordinator_apps(runtime, TASK, parent)


def admission(audited: bool, papers: Path | None) -> Callable[[str, Mapping[str, Scalar]], None]:
    """What a SuperLink asks before it stores a run.

    Args:
        audited: Whether the audit log gets a line.
        papers: As for `audit_file`.

    Returns:
        A function of the SHA-256 of the run's bundle and of its settings. It raises RunError for
        another app than the installed one, or where the line cannot be written.
    """

    def admit(digest: str, settings: Mapping[str, Scalar]) -> None:
        with folder_to_pack() as folder:
            if digest != flower().packed_digest(folder):
                raise RunError(
                    "the run brings another app than the app that is installed with this SuperLink; "
                    "submit it with `coordinator run` of the same installation"
                )
        if audited:
            note(papers, "submit", _facts(settings))

    return admit


def _facts(settings: Mapping[str, Scalar]) -> dict[str, object]:
    """As `facts_of_run`; a run whose settings cannot work fails later, with the reason in its folder."""
    try:
        return facts_of_run(settings)
    except FedSurrogateError:
        return {"digest": "", "proposal": "", "settings": dict(settings)}


if __name__ == "__main__":
    with app_folder() as installed:
        flower().coordinator_task(installed)
