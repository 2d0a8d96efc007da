"""Tutorials are followed step by step, as a reader types them."""

import ast
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet18

from fedsurrogate.client_app.cli import main as cli
from fedsurrogate.common.backbones.own_backbones import own_backbone
from tests.commands import coordinator, site
from tests.documents import DOCS, blocks, commands, masked, shown_after, words

BUDGET = DOCS / "tutorials" / "privacy-budget.md"


def make_images(folder: Path) -> None:
    """A hospital's images in a folder for each class."""
    random = np.random.default_rng(0)
    for name in ("no", "yes"):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            Image.fromarray(random.integers(0, 255, (28, 28), dtype=np.uint8)).save(
                folder / name / f"{number}.png"
            )


def check_shown(expected: str, printed: str) -> int:
    """Each line that a page shows is printed, in this order, up to its numbers; returns how many."""
    left, lines = masked(printed), masked(expected)
    for line in lines:
        assert line in left, f"{line!r} is not printed:\n{printed}"
        left = left[left.index(line) + 1 :]
    return len(lines)


def test_the_tutorial_about_a_budget_can_be_followed_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "xrays")
    (policy,) = blocks(BUDGET, "toml")
    (tmp_path / "policy.toml").write_text(policy)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 200)
    typed = [
        words(line.replace("/data/xrays", str(tmp_path / "xrays")))
        for block in commands(BUDGET)
        for line in block
    ]
    assert [line[1] for line in typed] == ["policy", "ledger", "dry-run", "ledger"]
    shown = []
    for line in typed:
        code, printed = site(monkeypatch, *line[1:]), capsys.readouterr()
        assert code == 0, printed.err
        shown.append(printed.out)
    checked, opened, tried, left = shown
    assert "policy.toml is fine" in checked
    assert "witness" in opened
    assert "epsilon" in tried
    assert "nothing has left yet" in left
    for (_, expected), printed in zip(shown_after(BUDGET), shown, strict=True):
        assert check_shown(expected, printed)


@pytest.mark.timeout(400)
def test_the_walk_from_a_folder_to_a_decision_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command, on the pictures that a reader draws; each line that the page shows is printed,
    up to its numbers.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 200)
    run, seen = "", 0
    for lines, expected in shown_after(DOCS / "tutorials" / "decision.md"):
        if lines[0].startswith("RUN="):
            run = subprocess.run(
                ["bash", "-c", f"{lines[0]}; echo $RUN"], check=True, capture_output=True, text=True
            ).stdout.strip()
            assert Path(run, "metrics.json").is_file()
            continue
        printed = ""
        for line in lines:
            program, *typed = words(line.replace("$RUN", run))
            command = coordinator if program == "coordinator" else site
            assert command(monkeypatch, *typed) == 0, capsys.readouterr().err
            printed += capsys.readouterr().out
        assert expected, f"no output is shown after {lines}"
        seen += check_shown(expected, printed)
    assert seen > 30
    assert len(Path("predictions.csv").read_text().splitlines()) == 201


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", ["findings", "time-to-event"])
def test_a_tutorial_on_drawn_pictures_can_be_typed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer pictures than a reader draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 200)
    document, seen = DOCS / "tutorials" / f"{page}.md", 0
    for (line,), expected in shown_after(document):
        typed = words(line.replace("--images 1500", "--images 150 --size 32"))
        assert coordinator(monkeypatch, *typed[1:]) == 0, capsys.readouterr().err
        seen += check_shown(expected, capsys.readouterr().out)
    assert seen > 5
    (code,) = blocks(document, "python")
    capsys.readouterr()
    exec(compile(code, document.name, "exec"), {})
    answered = ast.literal_eval(capsys.readouterr().out)
    if page == "findings":
        assert [len(each) for each in answered.values()] == [3, 3]
    else:
        curve = [value for name, value in answered.items() if name.startswith("survival ")]
        assert len(curve) > 1
        assert sorted(curve, reverse=True) == curve


def test_the_backbone_in_python_of_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks(DOCS / "tutorials" / "backbone.md", "python")
    weights = tmp_path / "lungs.safetensors"
    network = resnet18()
    network.fc = nn.Identity()
    save_file(network.state_dict(), weights)
    package = tmp_path / "hospital"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "vision.py").write_text(code.replace("/models/lungs.safetensors", str(weights)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert own_backbone("python:hospital.vision:lungs", device="cpu").dim == 512


def test_the_data_set_in_python_of_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(DOCS / "tutorials" / "own-images.md", "python")
    make_images(tmp_path / "xrays")
    monkeypatch.chdir(tmp_path)
    # No download of weights here.
    code = code.replace(
        'backbone="torchvision:mobilenet_v2"', 'backbone="pixels", image_size=8, head__min_steps=20'
    )
    code = code.replace("/data/xrays", str(tmp_path / "xrays"))
    exec(compile(code, "own-images.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "report.html" in printed
    assert "6 of 6" in printed
