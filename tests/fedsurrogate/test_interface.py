"""The Python interface gives what the federation gives, and refuses what the federation refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import fedsurrogate as fs
from fedsurrogate.common.errors import (
    DataError,
    SurrogateError,
)
from tests.replies import as_received

DIGITS = load_digits()
X, Y = DIGITS.data / 16, DIGITS.target
PARTS = [(X[i:1400:3], Y[i:1400:3]) for i in range(3)]
TEST = (X[1400:], Y[1400:])
QUICK: dict[str, Any] = {"head__min_steps": 150, "head__epochs": 1}


def made(**settings: Any) -> list[fs.Surrogate]:
    return [fs.fit(x, y, site=str(i), **QUICK | settings) for i, (x, y) in enumerate(PARTS)]


def test_what_is_learned_from_fitted_surrogates_is_what_a_run_learns(tmp_path: Path) -> None:
    model = fs.learn(made())
    result = fs.simulate(PARTS, test=TEST, output_dir=tmp_path, **QUICK)
    assert result.accuracy == pytest.approx(as_received(model).score(*TEST), abs=1e-6)
    assert np.allclose(result.model.predict_proba(TEST[0]), model.predict_proba(TEST[0]), atol=1e-4)
    assert result.report().is_file()
    assert list(result.to_frame().index) == ["0", "1", "2"]
    assert sum(result.to_frame()["bytes"]) == result.bytes
    assert len(result.rounds) == 1


@pytest.mark.parametrize("method", ["fedpft", "ensemble", "average"])
def test_saved_models_and_surrogates_load_as_they_were(tmp_path: Path, method: str) -> None:
    surrogates = made(method=method)
    again = [
        fs.load(each.save(tmp_path / f"{each.site}.pb"), fs.Surrogate, method=method, **QUICK)
        for each in surrogates
    ]
    model = fs.learn(again)
    loaded = fs.load(model.save(tmp_path / "model.safetensors"))
    assert isinstance(loaded, fs.Model)
    assert (loaded.predict(TEST[0]) == model.predict(TEST[0])).all()


def test_a_private_surrogate_has_the_noise_of_its_budget() -> None:
    quiet = [
        fs.noisy(x, y, classes=range(10), epsilon=1e4, delta=1e-5, site=str(i))
        for i, (x, y) in enumerate(PARTS)
    ]
    loud = [
        fs.noisy(x, y, classes=range(10), epsilon=0.5, delta=1e-5, site=str(i))
        for i, (x, y) in enumerate(PARTS)
    ]
    assert fs.learn(quiet).score(*TEST) > 0.85
    assert fs.learn(loud).score(*TEST) < 0.8
    assert "epsilon 0.5" in repr(loud[0])


def test_epsilon_and_noise_multiplier_are_inverse() -> None:
    noise = fs.noise_multiplier(2.0, 1e-5)
    assert fs.epsilon(noise, 1e-5) == pytest.approx(2.0, rel=1e-6)
    sampled = fs.noise_multiplier(2.0, 1e-5, sample_rate=0.1, steps=50)
    assert 1.9 < fs.epsilon(sampled, 1e-5, sample_rate=0.1, steps=50) <= 2.0


def test_an_own_module_gives_features(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Dropout())
    fs.register_backbone("mine", module, lambda row: torch.as_tensor(row).float())
    found = fs.features(X[:100], "mine")
    assert found.shape == (100, 16)
    assert torch.equal(found, fs.features(torch.tensor(X[:100]).float(), module)), (
        "no dropout, either way"
    )
    assert module.training


def test_a_run_folder_is_a_model_and_a_power_of_its_features_is_applied(tmp_path: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    x = images / 16
    sites = [(x[k::3], labels[k::3]) for k in range(3)]
    result = fs.simulate(sites, output_dir=str(tmp_path), features__power_transform=0.5)
    model = fs.load(result.folder)
    assert isinstance(model, fs.Model)
    assert model.score(x, labels) > 0.9
    # The power is in the file: squared features are not what it was learned from.
    assert model.score(x**2, labels) < model.score(x, labels)
    learned = fs.learn(
        [fs.fit(*site, site=str(k), features__power_transform=0.5) for k, site in enumerate(sites)]
    )
    assert learned.score(x, labels) > 0.9


def test_what_is_no_model_and_features_of_another_backbone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SurrogateError, match="did not finish"):
        fs.load(tmp_path)
    model = fs.learn(made())
    with pytest.raises(DataError, match="needs 64; compute"):
        model.predict(X[:5, :10])
    file = model.save(tmp_path / "model.safetensors")
    (tmp_path / "model.fedsurrogate").write_bytes(file.read_bytes())
    with pytest.raises(SurrogateError, match="coordinator export"):
        fs.load(tmp_path / "model.fedsurrogate")


def test_type_checkers_read_the_types_of_the_package() -> None:
    assert (Path(fs.__file__).parent / "py.typed").is_file()
