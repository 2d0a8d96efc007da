"""Commands and options of `coordinator` that are no more, and what does the same."""

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
    "mlflow RUN` logs a run, and `coordinator metrics` shows one that goes on to Prometheus"
)
GONE = {
    "queue": _QUEUE,
    "tensorboard": _TENSORBOARD,
    "run --queue": _QUEUE,
    "run --at": _QUEUE,
    "export --format rocrate": _CRATE,
    "export --format torchscript": _GRAPHS,
    "export --format torch-export": _GRAPHS,
}
