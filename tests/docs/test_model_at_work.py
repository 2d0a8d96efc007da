"""Every `site` command of the page about a model at work, typed at a hospital in the order of the page;
and what it says a coordinator writes of a run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.sample_data import write_xrays
from tests.commands import coordinator, site
from tests.documents import DOCS, commands, words

PAGE = DOCS / "model-at-work.md"
# The page's names, and those of this hospital.
MEANT = {
    "/data/new": "xrays/new",
    "/data/labelled": "xrays/new",
    "scanner,sex,age": "hospital,event",
    "--positive yes": "--positive pneumonia",
}
# Formats with packages of their own, and a second simulation, have tests of their own.
LEFT_OUT = ("--format onnx", "coordinator evaluate", "coordinator survey")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with X-rays and the folders of two runs over them."""
    folder = tmp_path_factory.mktemp("work")
    write_xrays(folder / "xrays", hospitals=3, images=400, pixels=24)
    for method in ("average", "fedpft"):
        settings: dict[str, str | int] = {
            "method": method,
            "data": "imagefolder",
            "data-dir": str(folder / "xrays" / "hospitals"),
            "partition": "column",
            "site-column": "hospital",
            "patient-column": "patient",
            "backbone": "pixels",
            "image-size": 16,
            "device": "cpu",
            "output-dir": str(folder / "runs"),
        }
        simulate_here(3, settings, lambda event: None)
    return folder


@pytest.mark.slow
def test_the_page_can_be_typed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    first, second = sorted(
        (folder for folder in (place / "runs").iterdir() if folder.name != "signing"),
        key=lambda folder: "fedpft" in folder.name,
    )
    for run, file in ((first, "other.fedsurrogate"), (second, "model.fedsurrogate")):
        assert coordinator(monkeypatch, "export", run, "--out", file) == 0
    capsys.readouterr()
    node = f'site="north" data="imagefolder" data-dir="{place}/xrays/hospitals/north"'
    node += f' patient-column="patient" state-dir="{place}/state" device="cpu"'
    monkeypatch.setenv("FEDSURROGATE_NODE_CONFIG", node)
    from fedsurrogate.common.signed_models.signed_model import read_signed_model

    key = read_signed_model(Path("other.fedsurrogate")).key.hex()
    # What a run would have brought: one model, which is in use, and another.
    for file in ("other.fedsurrogate", "model.fedsurrogate"):
        assert site(monkeypatch, "models", "add", file, "--signer", key, "--use") == 0
    kept = read_signed_model(Path("other.fedsurrogate")).manifest.name
    Path("patients").mkdir()
    typed = 0
    for line in (line for block in commands(PAGE) for line in block):
        for name, own in MEANT.items():
            line = line.replace(name, own)
        line = line.replace("20261122-fedpft-0bc876d8", kept).replace("RUN", str(second))
        if any(part in line for part in LEFT_OUT):
            continue
        program, *rest = words(line)
        code = (site if program == "site" else coordinator)(monkeypatch, *rest)
        errors = capsys.readouterr().err
        # Where no version of its own was better, none can be removed.
        nothing = "--remove" in line and "has no version of its own" in errors
        assert code == 0 or nothing, f"{line}: {errors}"
        typed += 1
    assert typed > 14
    assert Path("evaluation/evaluation.html").is_file()
    assert Path("patients/all.csv").is_file()
    shutil.rmtree(place / "state")
