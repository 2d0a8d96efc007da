"""Commands and options of `coordinator` that are no more, and what does the same."""

_QUEUE = (
    "the queue of runs is gone, and no release had it; cron, at or systemd-run start `coordinator "
    "run --proposal FILE` at a time, and the SuperLink starts one run after another"
)
GONE = {"queue": _QUEUE, "run --queue": _QUEUE, "run --at": _QUEUE}
