"""No seed repeats what must be secret: noise, samples, encodings, masks, shares and keys come from
the operating system alone.

The attack: who sets, knows or copies the state of the other generators (those of Python, numpy and
torch, and the run's seed) draws what a site has drawn, and takes it out of the release. Processes
that are forked from one have the same state, too. These tests have the operating system's bytes,
which all others replace (`tests/conftest.py`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256, shake_256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dpcvae import training
from fedsurrogate.client_app.processes import app_process
from fedsurrogate.client_app.secure_aggregation import _random
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.privacy import gaussian_mechanism, mechanism
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.safe_parsing import read_message
from fedsurrogate.common.secure_aggregation.secrets import (
    Secrets,
    announce,
    deal,
    open_share,
    pair_secrets,
)
from fedsurrogate.common.security.sealing import new_key, public_key, seal
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.strategies.base.training import Training
from tests.attacks.privacy.neighbours import Record
from tests.attacks.privacy.summing import SUMS, Summing
from tests.attacks.privacy.visits import (
    METHODS,
    PRIVATE,
    TARGETS,
    Hospital,
    close_logs,
    judged_head,
    question,
)
from tests.children import in_child
from tests.hostile import payload_of
from tests.registry import SPECS, TINY, settings_of

Numbers = dict[str, np.ndarray]
Scalar = str | int | float | bool
# So many that two samples of half of them are never the same.
RECORDS = tuple(Record("ab"[at % 2], str(at), grey=at, size=4 + at % 5) for at in range(120))
# A sealed message is never the same twice, whatever is in it; the chain without seals is here.
FORMS = {name: own for name, own in (METHODS | TARGETS).items() if name != "sealed chain"}
# A method of the registry that has no form above has one here.
RUNS = FORMS | {
    name: settings_of(spec, TINY) | PRIVATE
    for name, spec in SPECS.items()
    if spec.private
    and spec.name not in {str(each.get("method", "fedpft")) for each in FORMS.values()}
}
# Images and mixtures follow the records only where the noise is small. Whole numbers need much, to
# differ. Steps of Adam have the size of the rate, whatever their gradient.
LITTLE: dict[str, Scalar] = {"epsilon": 50.0, "fedlap.image-steps": 5}
MUCH: dict[str, Scalar] = {"epsilon": 0.01}
USUAL: dict[str, Scalar] = {"dpcvae.optimiser": "sgd"}
RATES = ("fedavg.sample-rate", "fedlap.sample-rate", "dpcvae.sample-rate")
SAMPLED = [
    name for name, own in RUNS.items() if parse_run(PRIVATE | own).plan.mechanism_name == "dp-sgd"
]


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise that a sampled run needs takes seconds to find."""
    monkeypatch.setattr(mechanism, "_calibrated", lambda *_: 5.0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Iterator[Path]]:
    yield (tmp_path / str(number) for number in count())
    close_logs()


def seed_all(number: int) -> None:
    """Give every other generator of the process this seed."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Clinic(Hospital):
    """Keeps the bytes that leave."""

    def released(self, settings: dict[str, Scalar]) -> tuple[list[bytes], Numbers]:
        """What a run with these settings releases: its payloads, and the numbers in them that are
        not those of the model that came.
        """
        (self.home / "policy.toml").write_text(
            "epsilon-per-run = 100.0\nepsilon-total = 1000.0\ndelta = 0.001\nmechanisms = ['*']\n"
        )
        self.run_id += 1
        run = PRIVATE | settings
        judged = judged_head(parse_run(PRIVATE), *self.place)
        if "counting.digest" in run:
            run["counting.digest"] = sha256(judged).hexdigest()
        config = parse_run(run)
        model, training = judged if "counting.digest" in run else None, None
        if config.plan.kind == "rounds":
            training = Training.begin(config, config.settings.classes, *self.place)
            training.lineage = "abc"
        payloads, numbers = [], dict[str, np.ndarray]()
        for number in range(1, 2 if config.plan.messages.first is None else 3):
            reply = self.ask("train", run, question(config, training, number, model))
            assert reply.config_records[INFO]["status"] == "ok"
            payloads.append(payload_of(reply))
            came = {} if training is None else numbers_in(training.payload())
            network = [np.zeros(0)]
            for name, found in numbers_in(payloads[-1]).items():
                if name not in came:
                    numbers[f"{number}{name}"] = found
                elif came[name].shape != found.shape:
                    network.append(found)  # Some of the numbers, and noise decides which.
                else:
                    network.append(found[found != came[name]])
            if len(network) > 1:
                numbers[f"{number} network"] = np.concatenate(network)
            if training is not None:
                training.finish_round(["clinic"])
        return payloads, numbers


def numbers_in(payload: bytes) -> Numbers:
    """All tables of numbers in a reply, by place and name."""

    def tables(message: Any, at: str) -> Iterator[tuple[str, np.ndarray]]:
        for what, value in message.ListFields():
            if what.message_type is None:
                continue
            for each in value if what.is_repeated else [value]:
                name = f"{at} {getattr(each, 'name', '') or what.name}"
                if isinstance(each, pb.Halves):
                    yield name, each.scale * np.frombuffer(each.data, "<f2").astype(float)
                elif isinstance(each, pb.Table):
                    yield name, np.frombuffer(each.data, "<i4")
                else:
                    yield from tables(each, name)

    for kind in (pb.Surrogate, pb.Parameters, pb.Synthetic, pb.Counts, pb.Relay):
        try:
            message: Any = read_message(kind, payload, "reply")
        except SurrogateError:
            continue
        parts = [numbers_in(each) for each in message.surrogates] if kind is pb.Relay else []
        if found := parts[-1] if parts else dict(tables(message, "")):
            return found
    raise AssertionError("a reply without numbers")


def repeated(releases: list[Numbers]) -> list[str]:
    """Tables of which most numbers are the same in all releases."""
    found = []
    for name, first in releases[0].items():
        others = [each[name] for each in releases[1:]]
        if all(each.shape == first.shape for each in others):
            same = np.logical_and.reduce([each == first for each in others])
            found += [name] if not len(first) or same.mean() > 0.5 else []
    return found


def with_noise(settings: dict[str, Scalar]) -> dict[str, Scalar]:
    run = parse_run(PRIVATE | settings)
    if run.plan.counts:
        return settings | MUCH
    return settings | (USUAL if "dpcvae" in run.method.reads else LITTLE)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("system_noise")
def test_noise_alone_makes_every_number_of_two_releases_differ(
    home: Iterator[Path], name: str
) -> None:
    settings = with_noise(RUNS[name]) | dict.fromkeys(RATES, 1.0)

    def release() -> Numbers:
        seed_all(0)
        return Clinic(next(home), "features", RECORDS).released(settings)[1]

    found = [release(), release()]
    # By chance, 16 bits may hold one number twice, but not three times.
    assert not repeated(found) or not repeated([*found, release()])


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.usefixtures("system_noise", "known_noise")
def test_no_seed_repeats_a_sample_or_the_noise_of_encodings(
    home: Iterator[Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[Any]()

    def kept(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def draw(*given: Any) -> torch.Tensor:
            found = real(*given)
            drawn.append(found.flatten().tolist())
            return found

        return draw

    monkeypatch.setattr(record_gradients, "poisson_sample", kept(record_gradients.poisson_sample))
    monkeypatch.setattr(training, "system_normals", kept(training.system_normals))
    settings = with_noise(RUNS[name]) | dict.fromkeys(RATES, 0.5)
    for _ in range(2):
        seed_all(0)
        Clinic(next(home), "features", RECORDS).released(settings)
    assert len(drawn) > 1
    assert [each for at, each in enumerate(drawn) if each in drawn[:at]] == []


@pytest.mark.usefixtures("system_noise", "known_noise")
def test_the_noise_of_encodings_alone_makes_two_releases_differ(
    home: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who knew it could tell how many records stand before another one in a step."""
    monkeypatch.setattr(
        gaussian_mechanism, "discrete_gaussian", lambda _, count: np.zeros(count, np.int64)
    )
    monkeypatch.setattr(record_gradients, "poisson_sample", lambda count, _: torch.arange(count))
    found = []
    for _ in range(2):
        seed_all(0)
        clinic = Clinic(next(home), "features", RECORDS)
        found.append(clinic.released(with_noise(RUNS["dpcvae"]))[1])
    # Of the first round, which is sums of records, and not of the second, which is training.
    assert set(repeated(found)) == {each for each in found[0] if each.startswith("1 ")}
    assert "2 network" in found[0]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("known_noise")
def test_a_release_follows_from_the_run_and_the_operating_system(
    home: Iterator[Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bytes of the operating system and other seeds of everything else."""
    found = []
    for number in range(2):
        drawn = count()
        system = SimpleNamespace(
            urandom=lambda size, drawn=drawn: shake_256(str(next(drawn)).encode()).digest(size)
        )
        monkeypatch.setattr(gaussian_mechanism, "os", system)
        seed_all(number)
        clinic = Clinic(next(home), "features", RECORDS)
        found.append(clinic.released(with_noise(RUNS[name]) | dict.fromkeys(RATES, 0.5))[0])
        assert next(drawn) > 0, "a private release that draws nothing"
    assert found[0] == found[1]


class Member(Summing):
    """Keeps what it sends in secure aggregation, and may add noise."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, "features", RECORDS)
        with (home / "policy.toml").open("a") as policy:
            policy.write("epsilon-per-run = 100.0\nepsilon-total = 100.0\nmechanisms = ['*']\n")
        self.sent: list[bytes] = []

    def ask(self, kind: str, run: dict[str, Scalar], content: RecordDict) -> RecordDict:
        reply = super().ask(kind, run, content)
        info = reply.config_records[INFO]
        assert info["status"] == "ok", info
        if kind in ("query.hello", "query.sum_shares", "train"):
            key = str(info.get("key", ""))
            self.sent.append(bytes.fromhex(key) if key else payload_of(reply))
        return reply

    def drawn(self) -> dict[str, object]:
        """Keys, shares and masked numbers that it has sent."""
        assert self.total is not None
        key, dealt, masked = self.sent
        member, shares = surrogate_proto.unpack_member(key), surrogate_proto.unpack_dealt(dealt)
        _, numbers, _ = surrogate_proto.unpack_masked(masked, len(self.total))
        return {
            "masking": member.masking,
            "sharing": member.sharing,
            **{f"shares for {name}": each for name, each in shares.content.items()},
            **{f"number {at}": int(each) for at, each in enumerate(numbers[:3])},
        }


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("name", ["survey", "gram", "dp-fedavg"])
@pytest.mark.usefixtures("system_noise")
def test_keys_shares_and_masks_of_two_equal_sums_differ(
    home: Iterator[Path], name: str, noise: bool
) -> None:
    settings = {**SUMS, "dp-fedavg": SUMS["fedavg"]}[name] | {"classes": "a,b"}
    if noise:
        settings |= {"epsilon": 1.0, "delta": 1e-6, **dict.fromkeys(RATES, 1.0)}
        settings |= {"method": "dp-fedavg"} if name == "dp-fedavg" else {}
    members = []
    for _ in range(2):
        seed_all(0)
        members.append(Member(next(home)))
        members[-1].sum(settings)
    one, other = members
    assert one.total is not None
    assert other.total is not None
    same = float((one.total == other.total).mean())
    assert same < 0.5 if noise else same == 1
    first, second = one.drawn(), other.drawn()
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] == second[key]] == []


def secrets_drawn() -> dict[str, bytes]:
    """What sites keep secret, by name."""
    secrets = [Secrets.fresh() for _ in range(3)]
    private, context = bytes(range(32)), b"a sum"
    members = {
        name: announce(name, own, private, public_key(private), context)
        for name, own in zip("abc", secrets, strict=True)
    }
    # Of the same secrets: only the polynomial is new.
    same = Secrets(bytes(16), bytes(range(32)), bytes(16))
    known = {**members, "a": announce("a", same, private, public_key(private), context)}
    sent, read = (pair_secrets(own.sharing, known) for own in (same, secrets[1]))
    shares = open_share(deal("a", same, sent, known, 2, context), "b", read, known, context)
    sealed = pb.Sealed.FromString(seal(b"a surrogate", private, {"b": public_key(private)}, b"1"))
    return {
        "noise": gaussian_mechanism.discrete_gaussian(10**12, 8).tobytes(),
        "sample": record_gradients.poisson_sample(4000, 0.5).numpy().tobytes(),
        "encodings": gaussian_mechanism.system_normals([8]).numpy().tobytes(),
        "withheld": _random(8)[:-1].tobytes(),
        "key": new_key(),
        "sealed": sealed.content,
        "nonce": sealed.nonce,
        **{f"share of {kind}": share for kind, share in shares.items()},
        **{
            f"{kind} of a sum": getattr(secrets[0], kind)
            for kind in ("masking", "sharing", "blind")
        },
    }


@pytest.mark.parametrize("fork", [os.fork, app_process._fork])
@pytest.mark.usefixtures("system_noise")
def test_no_secret_is_drawn_twice_whatever_is_seeded_or_forked(
    home: Iterator[Path], fork: Callable[[], int]
) -> None:
    places = [next(home) for _ in range(2)]

    def draw(place: Path) -> dict[str, bytes]:
        seed_all(0)
        clinic = Clinic(place, "features", RECORDS)
        kinds = ("sums diag", "dp-fedavg")
        released = {kind: clinic.released(RUNS[kind])[1] for kind in kinds}
        numbers = {
            f"{kind} {name}": found.tobytes()
            for kind, tables in released.items()
            for name, found in tables.items()
        }
        return secrets_drawn() | numbers

    seed_all(0)
    here = secrets_drawn()
    seed_all(0)
    assert not set(here.values()) & set(secrets_drawn().values())
    one, other = (in_child(fork, partial(draw, place)) for place in places)
    assert len(one) > 15
    assert [name for name in one if one[name] == other[name] or one[name] == here.get(name)] == []
