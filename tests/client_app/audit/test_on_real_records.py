"""Audits of X-rays with a class of copies, and LiRA on heads next to its authors' estimator."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from fedsurrogate.client_app.audit import release_audit
from fedsurrogate.client_app.audit.membership import Matrix, Trials, lira
from tests import commands
from tests.client_app.audit.test_release_audit import OPEN, attacked, hospital
from tests.samples import Samples

COPIES = 30


def write_xrays(xrays: Path, folder: Path, count: int) -> None:
    """X-rays in folders of their classes, and a class of near-copies of one of them: a pixel
    differs.
    """
    with np.load(xrays) as content:
        images, labels = content["train_images"], content["train_labels"].ravel()
    rows = np.random.default_rng(0).permutation(len(images))[:count]
    for row in rows:
        file = folder / ("no", "yes")[int(labels[row])] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[row]).save(file)
    (folder / "copies").mkdir()
    for at in range(COPIES):
        copy = images[rows[0]].copy()
        copy[0, at % 28] ^= at + 1
        Image.fromarray(copy).save(folder / "copies" / f"{at}.png")


@pytest.mark.slow
def test_the_audit_of_a_hospital_with_xrays_names_a_class_of_copies(
    tmp_path: Path, monkeypatch: Any, capsys: Any, samples: Samples
) -> None:
    write_xrays(samples("data/pneumonia/pneumonia-28px.npz"), tmp_path / "images", 300 - COPIES)
    (tmp_path / "policy.toml").write_text(OPEN)
    node = (
        f"site='north' data='imagefolder' data-dir='{tmp_path}/images' "
        f"policy='{tmp_path}/policy.toml'"
    )
    node += f" state-dir='{tmp_path}/state' cache-dir='{tmp_path}/cache'"
    arguments = (
        "--node-config",
        node,
        "-c",
        "backbone='pixels' image-size=28",
        "--seconds",
        "0",
        "--out",
        tmp_path / "out",
    )
    assert commands.site(monkeypatch, "check", "--attack", *arguments) == 0
    assert "a mean is nearly a record: class copies" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert "copies" in found["nearest"]["classes"]
    # All copies train: without a list of splits, a fifth of the images of each class tests.
    assert found["per_class"]["copies"][1] < found["per_class"]["no"][1]
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "A mean shows a record" in page
    assert found["standing_out_count"] == 0 or "<img src" in page


def of_the_authors(trials: Trials) -> Matrix:
    """Online LiRA as its authors describe it, with one variance of members and one of others for
    all records.

    Source: Carlini et al. 2022, algorithm 1, and section VI-C on few shadow models. Pairs of
    releases are left out here too.
    """
    found = np.empty(trials.scores.shape)
    for at in range(len(found)):
        rest = np.array([row // 2 != at // 2 for row in range(len(found))])
        scores, inside = trials.scores[rest], trials.members[rest]
        densities = []
        for mask in (inside, ~inside):
            mean = np.array([scores[own, record].mean() for record, own in enumerate(mask.T)])
            densities.append(norm.logpdf(trials.scores[at], mean, np.std((scores - mean)[mask])))
        found[at] = densities[0] - densities[1]
    return found


@pytest.mark.slow
def test_lira_on_heads_of_500_records_is_as_strong_as_its_authors_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two classes that are one Gaussian, so that a head has to remember its records."""
    node = hospital(tmp_path, [500, 500], d=64)
    content = load_file(tmp_path / "own-train.safetensors")
    save_file(
        content | {"x": torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))},
        tmp_path / "own-train.safetensors",
    )
    seen: list[Trials] = []

    def recorded(trials: Trials) -> Matrix:
        seen.append(trials)
        return lira(trials)

    monkeypatch.setattr(release_audit.membership, "lira", recorded)
    found = attacked(node, 64, method="average", **{"head.min-steps": 200, "head.epochs": 1})
    (trials,) = seen
    reference = float(roc_auc_score(trials.members.ravel(), of_the_authors(trials).ravel()))
    error = (found.attack.high - found.attack.low) / (2 * 1.96)
    assert reference > 0.6
    # Sharing between records makes it a little stronger: 0.620 against 0.609.
    assert reference - 2 * error < found.attack.auc < reference + 4 * error
