"""RMIA on heads, and attacks on release_audit, against closed forms and through an audit of a site."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

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
    MEANS,
    SUMS,
    Decoder,
    fresh_generator,
    tensors_of,
)
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
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


def test_a_synthetic_embedding_is_nearest_to_itself() -> None:
    made = decoder()
    labels = torch.tensor([0, 1])
    drawn = [
        made.draw(one_hot(torch.full((500,), k), 2).float(), torch.Generator().manual_seed(0))
        for k in (0, 1)
    ]
    found = closest_synthetic(
        made, torch.stack([drawn[0][3], torch.randn(6)]).detach(), labels, drawn=500
    )
    assert found[0] > found[1]


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


@pytest.mark.parametrize("sums", [False, True])
def test_a_generator_is_the_first_model_plus_the_changes_of_all_rounds_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: bool
) -> None:
    """Counts below zero, as noise makes them, are zero; a mean has at least one record."""
    run = parse_run({"method": "dpcvae", "dpcvae.rounds": 3, "backbone": "none"})
    own = LabelledFeatures(torch.ones(3, 4), torch.arange(3))
    found = SiteFeatures(own, own, ("a", "b", "c"), "features-4", 0.0, simulated=False)
    fresh = tensors_of(fresh_generator(run.settings, False, 3, 4))
    name = next(iter(fresh))
    counts = torch.tensor([-3.0, 0.5, 8.0])
    first = {COUNTS: counts} | ({SUMS: torch.arange(12.0).reshape(3, 4)} if sums else {})
    replies = [
        first,
        {name: torch.full_like(fresh[name], 0.5)},
        {name: torch.ones_like(fresh[name])},
    ]
    seen: list[Any] = []

    def answer(job: Job) -> Any:
        assert job.payload is not None
        sent = unpack_parameters(job.payload)
        kept = job.node.state / "kept"
        before = kept.read_bytes() if kept.exists() else b""
        seen.append((sent, job.info, before, job.node.state))
        assert (job.run, job.site, job.found) == (run, "audit", found)
        made = pack_parameters(Parameters(sent.header, sent.round, replies[sent.round - 1]))
        return SimpleNamespace(payload=made, keep={kept: bytes([sent.round])})

    monkeypatch.setattr(release_audit, "site_function", lambda combination: answer)
    made = tensors_of(release_audit.generator_of(run, hospital(tmp_path, [1, 1, 1]), found))
    assert made[COUNTS].tolist() == [0.0, 0.5, 8.0]
    if sums:
        divided = first[SUMS] / torch.tensor([1.0, 1.0, 8.0])[:, None] * 2.0
        assert torch.allclose(made[MEANS], divided, rtol=1e-3)
    assert torch.allclose(made[name], fresh[name] + 1.5, atol=1e-2)
    others = fresh.keys() - {name, COUNTS, MEANS}
    assert others
    for other in others:
        assert torch.equal(made[other], fresh[other])
    for at, (sent, info, before, _) in enumerate(seen, 1):
        head = sent.header
        assert (head.method, head.run, head.site) == ("dpcvae", run.digest, "audit")
        assert (head.fingerprint, head.classes) == ("features-4", ("a", "b", "c"))
        assert info == {"round": at, "confirmed": at - 1, "lineage": "audit"}
        assert before == (bytes([at - 1]) if at > 1 else b"")
    assert len({place for *_, place in seen}) == 1
    assert not seen[0][-1].exists()


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
