"""Commands of `site` and `coordinator` that have another name since, or are no more."""

from __future__ import annotations

_QUEUE = (
    "the queue of runs is gone, and no release had it; cron, at or systemd-run start `coordinator "
    "run --proposal FILE` at a time, and the SuperLink starts one run after another"
)
_CRATE = (
    "--format rocrate is gone, and fedsurrogate 0.2.0 was the last with it; `coordinator report` and "
    "`--format card` write what a reader needs, and any archiver packs the folder of the run"
)
_GRAPHS = (
    "TorchScript and torch.export are gone, and fedsurrogate 0.2.0 was the last with them; "
    "`--format onnx` writes the same graph for onnxruntime"
)
_TENSORBOARD = (
    "`coordinator tensorboard` is gone, and fedsurrogate 0.2.0 was the last with it; `coordinator "
    "log RUN --to mlflow` logs a run, and `coordinator log runs --to prometheus` shows one that goes on"
)
_PRESET = "`--preset NAME` is now `-c NAME`, before other settings"
# Of a command, or of a command with an option: a sentence that says what to use instead.
GONE = {
    "coordinator": {
        "queue": _QUEUE,
        "tensorboard": _TENSORBOARD,
        "run --queue": _QUEUE,
        "run --at": _QUEUE,
        "export --format rocrate": _CRATE,
        "export --format torchscript": _GRAPHS,
        "export --format torch-export": _GRAPHS,
        **{f"{command} --preset": _PRESET for command in ("simulate", "sweep", "plan", "run")},
    },
    "site": {},
}
# Today's name of each command that had another one in fedsurrogate 0.2.0.
RENAMED = {
    "coordinator": {
        "approve": "approval approve", "approver": "approval key", "attach": "watch",
        "audit-log": "approval log", "certs": "sites certs", "enrol": "sites accept",
        "exchange": "offline exchange", "key": "sites key", "kit": "sites kit",
        "learn": "offline learn", "metrics": "log --to prometheus", "mlflow": "log --to mlflow",
        "preset": "settings --preset", "propose": "approval propose", "register": "sites register",
        "relearn": "refit", "request": "offline request", "sites": "sites list",
        "unregister": "sites unregister",
    },
    "site": {
        "classify": "generator classify", "audit": "check --attack", "disclose": "check --sheet",
        "dry-run": "check",
        "forget-sums": "ledger forget", "key": "offline key", "ledger": "ledger show",
        "ledger --open": "ledger open", "models": "models list", "ood": "generator ood",
        "policy check": "policy", "release": "offline release", "reopen-ledger": "ledger reopen",
        "synthesize": "generator synthesize",
    },
}  # fmt: skip


def gone(program: str) -> dict[str, str]:
    """What to say of each command of `program` that is no more, by its words."""
    renamed = {
        old: f"`{program} {old}` is now `{program} {new}`" for old, new in RENAMED[program].items()
    }
    return GONE[program] | renamed
