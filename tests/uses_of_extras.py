"""One use or more of every optional package, and what an environment without the package must
answer.

Run as a program, it does every use and prints the errors: for an environment that has the
dependencies alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsurrogate as fs
from fedsurrogate._arrays import data_frame
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.pacs import client_of, settings_of
from fedsurrogate.client_app.datasets.tables import read_table
from fedsurrogate.client_app.methods.dpcvae.downstream import fidelity
from fedsurrogate.client_app.model_use.target_metrics import (
    kaplan_meier_thirds,
    label_metrics,
    time_metrics,
)
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.libraries import stored_files
from fedsurrogate.common.extras import EXTRAS
from fedsurrogate.server_app.export.graph import check_onnx
from fedsurrogate.server_app.lifecycle.before_start import flower_engine
from fedsurrogate.server_app.monitoring.mlflow_runs import log_to_mlflow
from fedsurrogate.server_app.monitoring.prometheus import serve
from fedsurrogate.server_app.report.plots.sweep import draw_sweep

OBSERVED = np.array([(True, 1.0), (False, 2.0), (True, 3.0)], [("event", bool), ("time", float)])
RISKS = np.arange(3.0)
CHANCES = {"finding": np.array([0.6, 0.3])}
PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "classes": "0,1,2,3,4,5,6,7,8,9"}


def _simulate(folder: Path, **settings: Any) -> object:
    return fs.simulate(2, output_dir=folder / "runs", **settings)


def _serve(folder: Path) -> None:
    with serve(folder, "127.0.0.1", 0, 1, exposed=False):
        pass


def _table(folder: Path) -> object:
    return read_table(folder / "labels.parquet", (), LeftOut())


# The package, what the error names as its user, and the use.
USES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("ray", "--engine flower", lambda _: flower_engine(True, 2, 0)),
    ("torchvision", "backbone = 'torchvision:resnet18'", lambda at: _simulate(at, backbone="torchvision:resnet18")),
    ("torchvision", "backbone = 'torchvision:resnet18'", lambda _: load_backbone("torchvision:resnet18")),
    ("open_clip", "backbone = 'open_clip:RN50/openai'", lambda at: _simulate(at, backbone="open_clip:RN50/openai")),
    ("open_clip", "backbone = 'open_clip:RN50/openai'", lambda _: load_backbone("open_clip:RN50/openai")),
    ("timm", "backbone = 'timm:resnet18'", lambda at: _simulate(at, backbone="timm:resnet18")),
    ("timm", "backbone = 'timm:resnet18'", lambda _: load_backbone("timm:resnet18")),
    ("huggingface_hub", "backbone = 'timm:hf-hub:lab/vit'", lambda _: load_backbone("timm:hf-hub:lab/vit")),
    ("huggingface_hub", "backbone = 'torchvision:resnet18'", lambda _: stored_files("torchvision:resnet18")),
    ("ot", "method = 'dpcvae'", lambda at: _simulate(at, method="dpcvae")),
    ("ot", "method = 'dpcgan'", lambda at: _simulate(at, method="dpcgan", **PRIVATE)),
    ("ot", "the distance between records and synthetic records", lambda _: fidelity(torch.eye(4), torch.eye(4), 0)),
    ("pyarrow", "data = 'parquet'", lambda at: _simulate(at, data="parquet", data_dir=str(at))),
    ("pyarrow", "the table '", _table),
    ("h5py", "data = 'slides'", lambda at: _simulate(at, data="slides", data_dir=str(at))),
    ("dicomweb_client", "site fetch", lambda _: client_of("http://pacs/web", settings_of({}, None))),
    ("pydicom", "data = 'dicom'", lambda at: _simulate(at, data="dicom", data_dir=str(at))),
    ("matplotlib", "the plot of a sweep", lambda _: draw_sweep(())),
    ("pandas", "a data frame", lambda _: data_frame([])),
    ("onnx", "--format onnx", lambda _: check_onnx()),
    ("onnxruntime", "--format onnx", lambda _: check_onnx()),
    ("onnxscript", "--format onnx", lambda _: check_onnx()),
    ("prometheus_client", "`coordinator log --to prometheus`", _serve),
    ("mlflow", "`coordinator log --to mlflow`", lambda at: log_to_mlflow(at, "", "")),
    ("sksurv", "the evaluation of survival times", lambda _: time_metrics(OBSERVED, RISKS, 4.0)),
    ("lifelines", "the evaluation of survival times", lambda _: kaplan_meier_thirds(None, OBSERVED, RISKS, 4.0)),
    (
        "statsmodels",
        "the calibration of labels",
        lambda _: label_metrics(np.array([[1.0], [0.0]]), CHANCES, CHANCES, {}),
    ),
]  # fmt: skip


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """This process as if a package were not installed, whatever has imported it before."""
    names = {package, *(name for name in sys.modules if name.startswith(f"{package}."))}
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def answers(folder: Path) -> Iterator[tuple[str, str]]:
    """The error of every use, by its kind and text; empty where there is none."""
    assert {package for package, _, _ in USES} == set(EXTRAS)
    for _, _, use in USES:
        try:
            use(folder)
        except Exception as error:
            yield type(error).__name__, str(error)
        else:
            yield "", ""


if __name__ == "__main__":
    print(json.dumps(list(answers(Path(sys.argv[1])))))
