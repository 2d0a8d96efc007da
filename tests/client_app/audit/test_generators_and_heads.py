"""RMIA on heads, and attacks on release_audit, against closed forms and through an audit of a site."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.audit import release_audit
from fedsurrogate.client_app.audit.release_audit import (
    RMIA,
    closest_synthetic,
    generator_scores,
    likelihood,
)
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.common.models.generators import (
    COUNTS,
    SUMS,
    Decoder,
    fresh_generator,
    tensors_of,
)
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.model_proto import unpack_parameters
from tests.client_app.audit.test_release_audit import attacked, hospital


def decoder(hidden: int = 0, latent: int = 2, d: int = 6) -> Decoder:
    torch.manual_seed(3)
    made = Decoder(latent, hidden, 2, d, learned_variance=True, class_prior=True)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    made.means.copy_(torch.randn(2, d))
    return made


def test_a_decoder_is_read_first_and_any_other_generator_only_asked() -> None:
    made, features, labels = decoder(), torch.randn(4, 6), torch.tensor([0, 1, 1, 0])
    found = generator_scores(made, features, labels)
    white, black = found.values()
    assert torch.equal(white, likelihood(made, features, labels))
    assert torch.equal(black, closest_synthetic(made, features, labels))
    run = parse_run({"method": "dpcgan", "classes": "a,b"})
    other = fresh_generator(run.settings, run.method.adversarial, 2, 6)
    (only,) = generator_scores(other, features, labels).values()
    assert torch.equal(only, closest_synthetic(other, features, labels))


def test_heads_are_attacked_by_rmia_too(tmp_path: Path) -> None:
    found = attacked(
        hospital(tmp_path, [20, 20], d=64),
        method="average",
        **{"head.min-steps": 50, "head.epochs": 5},
    )
    assert found.others.keys() == {RMIA}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("method", ["dpcvae", "dpcgan"])
def test_a_generator_is_made_by_the_sites_own_code_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, private: bool
) -> None:
    """Each round gets the model to which all changes before are added; the first gives sizes."""
    flat: dict[str, Any] = {"method": method, "dpcvae.rounds": 3, "dpcvae.local-epochs": 1}
    flat |= {"backbone": "none", "data": "safetensors"}
    flat |= {"epsilon": 8.0, "delta": 1e-5, "classes": "0,1"} if private else {}
    run = parse_run(flat)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    own = LabelledFeatures(x, torch.arange(40) % 2)
    found = SiteFeatures(own, own, ("0", "1"), "features-6", 0.0, simulated=False)
    asked: list[tuple[dict[str, Any], Parameters, Parameters]] = []

    def kept(combination: Any) -> Any:
        made = site_function(combination)

        def work(job: Job) -> Any:
            output = made(job)
            assert job.payload is not None
            sent = unpack_parameters(job.payload)
            asked.append((dict(job.info), sent, unpack_parameters(output.payload)))
            return output

        return work

    monkeypatch.setattr(release_audit, "site_function", kept)
    node = hospital(tmp_path, [4, 4])
    module = release_audit.generator_of(run, node, found)
    assert [info["round"] for info, _, _ in asked] == [1, 2, 3][: run.rounds]
    assert [info["confirmed"] for info, _, _ in asked] == [0, 1, 2][: run.rounds]
    assert [sent.round for _, sent, _ in asked] == [1, 2, 3][: run.rounds]
    first, *later = (reply.tensors for _, _, reply in asked)
    wanted = dict(asked[1][1].tensors) if len(asked) > 1 else {}
    counts = first[COUNTS].clamp_min(0)
    assert torch.allclose(module.counts, counts, rtol=1e-2)
    if SUMS in first:
        means = first[SUMS] / first[COUNTS].clamp_min(1)[:, None] * math.sqrt(6)
        assert torch.allclose(module.means, means, atol=1e-2)
    for name in later[0]:
        wanted[name] = wanted[name] + sum(reply[name] for reply in later)
    final = tensors_of(module)
    for name in later[0]:
        # What is sent each time is rounded to 16 bits.
        assert torch.allclose(final[name], wanted[name], atol=2e-2, rtol=1e-2), name
    assert not (tmp_path / "state").exists(), "nothing is kept"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpcvae", "dpcgan"])
def test_a_generator_without_privacy_gives_the_only_record_of_a_class_away(
    tmp_path: Path, method: str
) -> None:
    settings: dict[str, Any] = {"method": method, "dpcvae.rounds": 3, "dpcvae.local-epochs": 1}
    found = attacked(hospital(tmp_path, [30, 30, 1]), **settings)
    assert found.per_class["2"] == (1, 1.0)
    assert found.attack_name.endswith("(white box)" if method == "dpcvae" else "(black box)")


@pytest.mark.slow
def test_a_private_generator_hides_it(tmp_path: Path) -> None:
    settings = {
        "method": "dpcvae",
        "dpcvae.rounds": 3,
        "dpcvae.local-epochs": 1,
        "classes": "0,1,2",
    }
    found = attacked(hospital(tmp_path, [30, 30, 1]), epsilon=1.0, delta=1e-5, **settings)
    assert found.proven <= 1.0
    assert found.attack.low <= found.allowed
