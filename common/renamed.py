"""Commands, settings and values that have another name since fedsurrogate 0.2.0, or are no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
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
_MAP = (
    "public-map is gone, and fedsurrogate 0.2.0 was the last with it; fedpft.public = the file of public "
    "features and features.projection = the file of the backbone's weights make the same map"
)
_PRESET = "`--preset NAME` is now `-c NAME`, before other settings"
_SUM = "`--secure-sum` is now `--secure-aggregation`"
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
        **{f"{command} --secure-sum": _SUM for command in ("evaluate", "survey")},
        "public-map": _MAP,
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
# Today's key of each setting of a run, a site or its policy that had another one in fedsurrogate 0.2.0.
SETTINGS = {
    "dpcvae.opening": "dpcvae.first-round",
    "dpcvae.opening-share": "dpcvae.first-round-fraction",
    "features.power": "features.power-transform",
    "require-secure-sum": "require-secure-aggregation",
    "secure-sum": "secure-aggregation",
    "secure-sum-range": "secure-aggregation-range",
    "secure-sum-records": "secure-aggregation-records",
    "secure-sum-threshold": "secure-aggregation-threshold",
    "target": "task",
    "witness-dir": "check-log-dir",
}
# The same of the lines of a kit's `.env`.
SETTING_LINES = {"WITNESS": "CHECK_LOG"}
# The same of values, by today's key.
VALUES = {
    "fedavg.noise": {"joint": "distributed"},
    "task": {
        "class": "classification",
        "labels": "multilabel",
        "number": "regression",
        "time": "survival",
    },
}


def renamed_setting(key: str, value: object) -> str:
    """What to say of a setting, or of its value, that had another name; empty for any other."""
    new = SETTINGS.get(key, key)
    today = VALUES.get(new, {}).get(value, "") if isinstance(value, str) else ""
    if new == key and not today:
        return ""
    return f"{key} = {value!r} is now {new} = {today!r}" if today else f"{key} is now {new}"


def of_today(flat: Mapping[str, T]) -> dict[str, T]:
    """Settings that an earlier version may have stored, by the names of today."""
    found: dict[str, T] = {}
    for key, value in flat.items():
        new = SETTINGS.get(key, key)
        values: Mapping[Any, Any] = VALUES.get(new, {})
        found[new] = values.get(value, value) if isinstance(value, str) else value
    return found


def gone(program: str) -> dict[str, str]:
    """What to say of each command of `program` that is no more, by its words."""
    renamed = {
        old: f"`{program} {old}` is now `{program} {new}`" for old, new in RENAMED[program].items()
    }
    return GONE[program] | renamed
