"""What a failed worker process of Flower's simulation means. Ray reports it as the text of an exception."""

from __future__ import annotations

# Ray ends a worker before memory runs out (OutOfMemoryError), or Linux does (the others).
KILLED = ("OutOfMemoryError", "ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError")
REMEDY = (
    "simulate fewer sites at the same time, such as `coordinator simulate --parallel 1`, or one by one with --engine local"
)
LONGEST = 500


def worker_failure(why: str, reason: str | None) -> str:
    """The reason why a simulated site did not reply. why: Flower's meaning of it. reason: the text of its exception."""
    reason = reason or ""
    if any(name in reason for name in KILLED):
        return f"the process of this simulated site was killed, most likely for lack of memory; {REMEDY}"
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return f"{why}: {lines[-1][:LONGEST]}" if lines else why
