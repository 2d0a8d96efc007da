"""Why a site did not reply, from Flower's error code and, in a simulation, the text of Ray's
exception.
"""

from __future__ import annotations

# Meaning of the error codes that Flower sends instead of a site's reply.
MEANINGS = {
    1: "the site's app could not be loaded",
    2: "the site's app failed",
    3: "the site's reply is not complete, as after a lost connection, or cannot be read",
    4: "the site's reply no longer exists",
    5: "the site's SuperNode was stopped, or its connection was lost",
    8: "the site's app was ended, or did not respond for a minute",
}
# Ray ends a worker before memory runs out (OutOfMemoryError), or Linux does (the others).
KILLED = (
    "OutOfMemoryError",
    "ActorDiedError",
    "ActorUnavailableError",
    "RayActorError",
    "WorkerCrashedError",
)
# The server above all workers has ended, and they with it.
SERVER_ENDED = ("node has crashed", "NodeDiedError", "node died", "LocalRayletDiedError")
REMEDY = (
    "simulate fewer sites at the same time, such as `coordinator simulate --parallel 1`, or "
    "one by one with --engine local"
)
LONGEST = 500


def no_reply(code: int, reason: str | None) -> str:
    """The reason why a site did not reply.

    Args:
        code: Flower's error code.
        reason: the text of a simulated site's exception; None for a real site, whose text may
            contain a path, so that only the code is kept.

    Example:
        >>> no_reply(2, None)
        "the site's app failed (Flower error code 2)"
    """
    why = f"{MEANINGS.get(code, 'the site did not answer')} (Flower error code {code})"
    return why if reason is None else worker_failure(why, reason)


def worker_failure(why: str, reason: str | None) -> str:
    """The reason why a simulated site did not reply.

    Args:
        why: Flower's meaning of it.
        reason: the text of its exception.
    """
    reason = reason or ""
    if any(words in reason for words in SERVER_ENDED):
        return (
            "the server of Ray, which runs the simulated sites, has ended: killed for lack of "
            f"memory, or too slow on a busy machine; {REMEDY}"
        )
    if any(name in reason for name in KILLED):
        return (
            "the process of this simulated site was killed, most likely for lack of memory; "
            f"{REMEDY}"
        )
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return f"{why}: {lines[-1][:LONGEST]}" if lines else why
