"""From a private run over gRPC to predictions and an evaluation at a hospital, with X-rays as PNG
and as DICOM.

Then the counts that a coordinator asks for.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsurrogate.common.signed_models.signed_model import read_signed_model
from tests.children import ok
from tests.dicom_files import image, save
from tests.e2e.processes import coordinator, federation, site_command
from tests.samples import Samples

CLASSES = ("no", "yes")
SETTINGS = (
    'classes="no,yes" epsilon=2.0 delta=1e-5 fedpft.covariance="spherical" backbone="pixels" image-size=14 sites=3 '
    "quorum=1.0 deadline=600.0"
)


def write_png(folder: Path, pixels: Any, labels: Any) -> None:
    for number, (each, label) in enumerate(zip(pixels, labels, strict=True)):
        file = folder / CLASSES[int(label)] / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each).save(file)


def write_dicom(folder: Path, pixels: Any, labels: Any) -> None:
    """Studies of patients with two images each, and a table of labels."""
    lines = ["SOPInstanceUID,label"]
    for number, (each, label) in enumerate(zip(pixels, labels, strict=True)):
        dataset = image(each, PatientID=f"P{number // 2}")
        save(folder / f"study-{number // 2}" / f"{number}.dcm", dataset)
        lines.append(f"{dataset.SOPInstanceUID},{CLASSES[int(label)]}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


def node(home: Path, name: str, kind: str) -> str:
    return (
        f'site="{name}" data="{kind}" data-dir="{home}/{name}" cache-dir="{home}/cache-{name}" '
        f'state-dir="{home}/state-{name}" check-log-dir="{home}/check-log-{name}" '
        f'policy="{home}/policy.toml" held-out-dir="{home}/held-{name}"'
    )


NODES = {"png-a": "imagefolder", "png-b": "imagefolder", "dicom": "dicom"}
# Counts that the coordinator asks for after the run: the command's options, and the epsilon that
# every site is charged.
COUNTS: dict[str, tuple[tuple[str, ...], float]] = {
    "evaluate": (("evaluate", "{run}"), 1.0),
    "survey": (("survey", "--classes", ",".join(CLASSES), "--dimension", "16"), 0.5),
    "summed": (("evaluate", "{run}", "--secure-aggregation"), 1.0),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, samples: Samples) -> Path:
    """Three hospitals after one private run and its counts, and new images of each kind. The
    commands' output: NAME.json.
    """
    home = tmp_path_factory.mktemp("work")
    mechanisms = 'mechanisms = ["sums", "counts", "secure-aggregation"]\n'
    (home / "policy.toml").write_text(f"{mechanisms}epsilon-per-run = 2.0\nepsilon-total = 4.5\n")
    with np.load(samples("data/pneumonia/pneumonia-28px.npz")) as content:
        pixels = np.concatenate([content["train_images"], content["test_images"]])
        labels = np.concatenate([content["train_labels"], content["test_labels"]]).ravel()
    # Classes of similar size: at epsilon 2 a class with few records does not stand out from the
    # noise.
    order = np.random.default_rng(0).permutation(len(labels))
    healthy, ill = (order[labels[order] == label] for label in (0, 1))
    chosen = np.random.default_rng(1).permutation(
        np.concatenate([healthy, ill[: 2 * len(healthy)]])
    )
    pixels, labels = pixels[chosen], labels[chosen]
    new, truth, held, known = pixels[:200], labels[:200], pixels[200:650], labels[200:650]
    pixels, labels = pixels[650:], labels[650:]
    for number, (name, kind) in enumerate(NODES.items()):
        rows = slice(number, None, 3)
        write = write_png if kind == "imagefolder" else write_dicom
        write(home / name, pixels[rows], labels[rows])
        write(home / f"held-{name}", held[rows], known[rows])
        assert (
            site_command(
                "ledger", "open", "--yes", "--node-config", node(home, name, kind)
            ).returncode
            == 0
        )
    write_png(home / "new-png", new, truth)
    write_dicom(home / "new-dicom", new, truth)
    with federation(
        home / "flower", [node(home, name, kind) for name, kind in NODES.items()]
    ) as running:
        ok(coordinator("run", *running.control, "-c", SETTINGS, cwd=home))
        # While the coordinator's processes run, so that whatever reached them would be in their
        # files.
        for name, kind in NODES.items():
            own, new = (
                node(home, name, kind),
                home / ("new-png" if kind == "imagefolder" else "new-dicom"),
            )
            assert site_command("models", "use", "--node-config", own).returncode == 0
            ok(
                site_command(
                    "predict",
                    "--data-dir",
                    str(new),
                    "--out",
                    f"{home}/{name}.csv",
                    "--node-config",
                    own,
                )
            )
            out = str(home / f"evaluation-{name}")
            ok(site_command("evaluate", "--data-dir", str(new), "--out", out, "--node-config", own))
        for name, (words, epsilon) in COUNTS.items():
            given = [word.format(run=run_folder(home)) for word in words]
            more = ["--epsilon", str(epsilon), *running.control, "--json"]
            done = ok(coordinator(*given, *more, cwd=home))
            (home / f"{name}.json").write_text(done.stdout)
    return home


def run_folder(home: Path) -> Path:
    """The folder of the run that learned the model."""
    (folder,) = (home / "runs").glob("*-fedpft-*")
    return folder


def of_the_coordinator(home: Path) -> list[Path]:
    """All files that the coordinator's processes have written: run folders, keys, database and
    logs.
    """
    own = [home / "flower" / name for name in ("superlink.log", "superexec.log")]
    database = list((home / "flower").glob("state.db*"))
    return own + database + [each for each in (home / "runs").rglob("*") if each.is_file()]


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_every_hospital_keeps_the_model_that_the_coordinator_signed(home: Path) -> None:
    folder = run_folder(home)
    signed = read_signed_model(folder / "model.fedsurrogate")
    assert signed.manifest.privacy is not None
    assert (signed.manifest.privacy.epsilon, signed.manifest.sites) == (2.0, 3)
    for name, kind in NODES.items():
        done = site_command("models", "list", "--json", "--node-config", node(home, name, kind))
        (model,) = json.loads(done.stdout)["models"]
        assert (model["name"], model["in_use"], model["state"]) == (
            signed.manifest.name,
            True,
            "intact",
        )


@pytest.mark.parametrize("name", NODES)
def test_new_images_are_classified_and_judged_at_every_hospital(home: Path, name: str) -> None:
    found, evaluation = rows(home / f"{name}.csv"), home / f"evaluation-{name}"
    assert len(found) == 200
    assert not any(row["problem"] for row in found)
    assert ("StudyInstanceUID" in found[0]) == (name == "dicom")
    facts = json.loads((evaluation / "evaluation.json").read_text())
    assert facts["report"]["records"] == 200
    assert facts["report"]["units"] == (100 if name == "dicom" else 0)
    assert facts["report"]["averages"]["macro_auroc"]["value"] > 0.75
    assert (evaluation / "evaluation.html").read_text().count("<svg") == 3


def test_the_coordinator_has_no_prediction_and_no_exact_count(home: Path) -> None:
    folder = run_folder(home)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["accuracy"] == {"per_site": {}}
    for event in (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()):
        assert not {"correct", "tested"} & set(event)
        assert event["event"] not in ("evaluated", "model-not-signed")
    predictions = rows(home / "dicom.csv")
    predicted = predictions[0]
    # The one with most digits: a probability of 0 or 1 is no secret that can be searched for.
    probability = max((row["p_yes"] for row in predictions), key=len)
    # New images, studies, a probability of one of them, and folders of hospitals.
    secrets = [
        "0000.png",
        "new-png",
        "new-dicom",
        *(predicted[key] for key in ("SOPInstanceUID", "StudyInstanceUID")),
        *([probability] if len(probability) > 4 else []),
    ]
    secrets += [f"{home}/{name}" for name in NODES] + [f"{home}/held-{name}" for name in NODES]
    # Columns of predictions and the page of an evaluation. The database holds the program itself,
    # which has these words.
    words = ["mahalanobis", "p_yes", "decision,", "stays at this site", "PatientID"]
    files = of_the_coordinator(home)
    assert {
        "metrics.json",
        "evaluation.json",
        "model.fedsurrogate",
        "state.db",
        "superlink.log",
    } <= {f.name for f in files}
    for file in files:
        content = file.read_bytes()
        for secret in secrets + (words if not file.name.startswith("state.db") else []):
            assert secret.encode() not in content, f"{secret} in {file}"


def test_hospitals_are_charged_for_every_count(home: Path) -> None:
    for name, kind in NODES.items():
        done = site_command("ledger", "show", "--json", "--node-config", node(home, name, kind))
        releases = [
            entry for entry in json.loads(done.stdout)["entries"] if entry["kind"] == "release"
        ]
        assert [entry["epsilon"] for entry in releases] == [
            2.0,
            *(epsilon for _, epsilon in COUNTS.values()),
        ]


def test_the_coordinator_learns_how_good_the_model_is_from_noisy_counts_alone(home: Path) -> None:
    result = json.loads((home / "evaluate.json").read_text())
    assert (result["sites"], result["per_site"], "exact" in result) == (3, {}, False)
    assert result["privacy"] == {"epsilon": 1.0, "delta": 1e-5}
    assert min(result["noise"].values()) > 0
    for found in (result["accuracy"], *(row["sensitivity"] for row in result["classes"].values())):
        assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert result["accuracy"]["high"] > 0.7
    # Counts of a site alone are not kept, and the exact ones are nowhere.
    assert not list(Path(result["folder"]).rglob("surrogates/*"))


def test_secure_aggregation_over_grpc_has_one_distributed_noise(home: Path) -> None:
    alone, summed = (
        json.loads((home / f"{name}.json").read_text()) for name in ("evaluate", "summed")
    )
    assert (summed["sites"], summed["secure_aggregation"], "per_site" in summed) == (3, True, False)
    # Without the one that may collude, two sites give the whole noise of one, so three give 3 / 2
    # of its variance.
    for name, noise in summed["noise"].items():
        assert noise**2 == pytest.approx(alone["noise"][name] ** 2 / 2, rel=0.02)
    assert abs(summed["records"]["value"] - alone["records"]["value"]) < 200
    assert summed["accuracy"]["high"] > 0.7
    assert not list(Path(summed["folder"]).rglob("surrogates/*"))


def test_the_coordinator_learns_how_many_records_each_hospital_has(home: Path) -> None:
    survey = json.loads((home / "survey.json").read_text())
    assert sorted(survey["per_site"]) == sorted(NODES)
    # 406 records at each site; DICOM files name patients, and a patient with two counts as one.
    # Noise of 17 in the sum.
    assert 900 < survey["records"]["value"] < 1130
    assert survey["estimate"]["accuracy"].keys() == {"1", "2", "4"}
