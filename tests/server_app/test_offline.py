"""Offline exchange with requests and bundles, compared with the same run over the network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import (
    BudgetError,
    ConfigError,
    LedgerError,
    RunError,
    SurrogateError,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Request, read_request
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.wire.records import (
    pack_bundle,
    unpack_bundle,
    unpack_public_mean,
    unpack_surrogate,
)
from fedsurrogate.common.wire.surrogate_proto import centre_digest
from fedsurrogate.server_app.exchange import learn_from_files, make_request
from tests.grid import FAST, SECRET, events_of, metrics_of, run_federation, sites

COORDINATOR = new_key()
PLAIN: dict[str, Any] = {"fedpft.covariance": "spherical", **FAST}
NAMED = f"fedsurrogate-request 2 {'0' * 128}\n"
PRIVATE: dict[str, Any] = PLAIN | {
    "epsilon": 1.0,
    "delta": 1e-5,
    "classes": ",".join(map(str, range(10))),
}


def node(folder: Path, index: int, **more: Any) -> NodeConfig:
    state, cache = str(folder / f"state-{index}"), str(folder / "cache")
    own: dict[str, Any] = {
        "coordinator_key": public_key(COORDINATOR).hex(),
        "state_dir": state,
        "cache_dir": cache,
    }
    return NodeConfig(partition_id=index, num_partitions=3, data="digits", **own | more)


class Post:
    """A request, the bundles of three sites, and a file of their keys."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.request_file = folder, folder / "request.json"
        self.request = make_request(settings, self.request_file, COORDINATOR)
        self.bundles = [folder / f"{index}.bundle" for index in range(3)]
        self.keys = {str(i): public_key(private_key(node(folder, i), str(i))) for i in range(3)}
        for index, file in enumerate(self.bundles):
            release_to(file, self.request_file, node(folder, index))
        self.keys_file = folder / "keys.toml"
        self.keys_file.write_text(
            "\n".join(f'{name} = "{key.hex()}"' for name, key in self.keys.items())
        )

    def learn(
        self,
        *files: Path,
        runs: tuple[Path, ...] = (),
        unsigned: tuple[Path, ...] = (),
        **local: Any,
    ) -> Path:
        chosen = {"output-dir": str(self.folder / "runs")} | {
            key.replace("_", "-"): value for key, value in local.items()
        }
        bundles = files or (() if runs or unsigned else self.bundles)
        return learn_from_files(self.request_file, bundles, self.keys_file, chosen, runs, unsigned)

    def refusals(self, folder: Path) -> dict[str, str]:
        return {
            event["site"]: event["reason"]
            for event in events_of(folder)
            if event["event"] == "rejected"
        }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Post:
    return Post(tmp_path_factory.mktemp("post"), PLAIN)


@pytest.fixture(scope="module")
def networked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_federation(tmp_path_factory.mktemp("network"), sites(3), **PLAIN)


def test_a_bundle_holds_the_very_bytes_the_network_would_carry(
    plain: Post, networked: Path
) -> None:
    for index, file in enumerate(plain.bundles):
        carried = unpack_bundle(file.read_bytes(), plain.request, plain.keys).payload
        assert carried == (networked / "surrogates" / f"{index}.pb").read_bytes()
    folder = plain.learn()
    assert metrics_of(folder)["sites"] == {"invited": 3, "used": 3, "rejected": 0, "dropped": 0}
    one, other = (load_file(each / "model.safetensors") for each in (folder, networked))
    assert all(bool((one[name] == other[name]).all()) for name in other)
    assert "0.bundle" not in (folder / "report.html").read_text()


def test_bundles_and_network_replies_are_taken_alike(plain: Post, networked: Path) -> None:
    loose = (networked / "surrogates" / "1.pb", networked / "surrogates" / "2.pb")
    mixed = plain.learn(plain.bundles[0], unsigned=loose)
    one, other = (load_file(each / "model.safetensors") for each in (mixed, networked))
    assert all(bool((one[name] == other[name]).all()) for name in other)
    whole = plain.learn(plain.bundles[0], runs=(networked,))
    assert metrics_of(whole)["sites"]["used"] == 3
    assert "a second surrogate of site '0'" in "".join(plain.refusals(whole).values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_bundle_with_any_byte_changed_added_or_lost_is_refused(
    plain: Post, data: st.DataObject
) -> None:
    whole = plain.bundles[0].read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    change: Callable[[bytes], bytes] = data.draw(
        st.sampled_from(
            [
                lambda b: b[:at] + bytes([b[at] ^ (1 << (at % 8))]) + b[at + 1 :],
                lambda b: b[:at],
                lambda b: b[:at] + b[at + 1 :],
                lambda b: b[:at] + b"\x00" + b[at:],
                lambda b: b + b"\x7a\x01x",
                lambda b: b + b,
            ]
        )
    )
    with pytest.raises(SurrogateError):
        unpack_bundle(change(whole), plain.request, plain.keys)


def test_what_others_signed_what_is_replayed_and_what_is_none_is_refused_and_the_rest_counts(
    plain: Post, tmp_path: Path
) -> None:
    good = unpack_bundle(plain.bundles[2].read_bytes(), plain.request, plain.keys)
    forged = pack_bundle(plain.request, "2", good.payload, {}, new_key())
    (tmp_path / "forged.bundle").write_bytes(forged)
    other = Request.fresh(plain.request.settings, None)
    own = private_key(node(plain.folder, 2), "2")
    (tmp_path / "replayed.bundle").write_bytes(pack_bundle(other, "2", good.payload, {}, own))
    (tmp_path / "renamed.bundle").write_bytes(
        pack_bundle(plain.request, "1", good.payload, {}, own)
    )
    # Signed by the site, but the surrogate has another site's name.
    (tmp_path / "borrowed.bundle").write_bytes(
        pack_bundle(plain.request, "1", good.payload, {}, private_key(node(plain.folder, 1), "1"))
    )
    (tmp_path / "stranger.bundle").write_bytes(
        pack_bundle(plain.request, "stranger", good.payload, {}, own)
    )
    (tmp_path / "none.bundle").write_bytes(b"none")
    folder = plain.learn(*sorted(tmp_path.glob("*.bundle")), plain.bundles[0], quorum=0.1)
    message = {
        Path(name).stem if "/" in name else name: why
        for name, why in plain.refusals(folder).items()
    }
    assert "has not signed" in message["forged"]
    assert f"this is request {plain.request.id!r}" in message["replayed"]
    assert "has not signed" in message["renamed"]
    assert "key is unknown here" in message["stranger"]
    assert "no bundle of `site offline release`" in message["none"]
    assert "names another site as its sender" in message["1"]
    assert metrics_of(folder)["sites"] == {"invited": 7, "used": 1, "rejected": 6, "dropped": 0}


def test_too_few_files_fail_with_a_complete_run_folder(plain: Post, tmp_path: Path) -> None:
    (tmp_path / "none.bundle").write_bytes(b"none")
    before = set((plain.folder / "runs").glob("*"))
    with pytest.raises(RunError, match="quorum"):
        plain.learn(tmp_path / "none.bundle", plain.bundles[0], quorum=1.0)
    (folder,) = set((plain.folder / "runs").glob("*")) - before
    assert metrics_of(folder)["status"] == "failed"
    with pytest.raises(ConfigError, match="there is no file"):
        plain.learn(tmp_path / "nowhere.bundle")
    with pytest.raises(ConfigError, match="fixed by the request"):
        plain.learn(seed=3)


def test_a_private_bundle_is_charged_once_and_tells_nothing_exact(tmp_path: Path) -> None:
    post = Post(tmp_path, PRIVATE)
    gate = open_gate(
        node(tmp_path, 0), parse_run(PRIVATE).settings.data, f"bundle-{post.request.id}"
    )
    (entry,) = gate.ledger.entries()
    bundle = unpack_bundle(post.bundles[0].read_bytes(), post.request, post.keys)
    reported = bundle.manifest["ledger"]
    assert (reported["sha256"], reported["epsilon"], reported["mechanism"]) == (
        entry["sha256"],
        1.0,
        "sums",
    )
    assert bundle.manifest["sha256"] == entry["sha256"]
    assert "facts" not in reported
    metrics = metrics_of(post.learn())
    assert metrics["privacy"]["epsilon"] == 1.0
    with pytest.raises(ConfigError, match="never replaced"):
        release_to(post.bundles[0], post.request_file, node(tmp_path, 0))
    assert len(gate.ledger.entries()) == 1


def test_what_may_not_leave_leaves_no_file_and_a_full_disk_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.toml").write_text("epsilon-total = 1.0")
    request, own = (
        make_request(PRIVATE, tmp_path / "r.json", COORDINATOR),
        node(tmp_path, 0, policy=str(tmp_path / "p.toml")),
    )
    release_to(tmp_path / "first.bundle", tmp_path / "r.json", own)
    (tmp_path / "p.toml").write_text("epsilon-total = 0.5")
    make_request(PRIVATE, tmp_path / "another.json", COORDINATOR)
    with pytest.raises(BudgetError):
        release_to(tmp_path / "second.bundle", tmp_path / "another.json", own)
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="nothing was charged"):
        release_to(tmp_path / "file" / "x.bundle", tmp_path / "r.json", node(tmp_path, 1))
    assert not open_gate(
        node(tmp_path, 1), parse_run(PRIVATE).settings.data, f"bundle-{request.id}"
    ).ledger.entries()
    assert sorted(file.name for file in tmp_path.glob("*bundle*")) == ["first.bundle"]
    assert not list(tmp_path.glob(".second*"))


def test_paths_of_the_site_are_in_no_bundle_and_paths_of_the_coordinator_in_no_request(
    tmp_path: Path,
) -> None:
    folder = tmp_path / SECRET
    folder.mkdir()
    post = Post(folder, PLAIN | {"output-dir": f"/{SECRET}/runs", "weights-path": f"/{SECRET}/w"})
    assert SECRET not in post.request_file.read_text()
    assert not any(SECRET.encode() in file.read_bytes() for file in post.bundles)


@pytest.mark.parametrize(
    "content",
    [
        *(
            f"{NAMED}{body}"
            for body in ("", "[]", "{}", "[" * 9999, '{"id": "x", "settings": {}, "centre": null}')
        ),
        *(
            "",
            "{}",
            '{"version": 1, "id": "ab54a98ceb1f0ad2", "settings": {}, "centre": null}',
            "fedsurrogate-request 2 \n{}",
        ),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "request.json").write_text(content)
    with pytest.raises(ConfigError, match="no request of"):
        read_request(tmp_path / "request.json", None)


def test_sites_subtract_the_public_mean_of_a_request(tmp_path: Path) -> None:
    """They took the mean of each feature's own columns instead, as without public images."""
    images = torch.rand(100, 64, generator=torch.Generator().manual_seed(0))
    save_file({"x": images}, tmp_path / "public.safetensors")
    public = {"fedpft.public": str(tmp_path / "public.safetensors")}
    post = Post(tmp_path, {"epsilon": 8.0, "delta": 1e-5, "classes": PRIVATE["classes"]} | public)
    sent = unpack_bundle(post.bundles[0].read_bytes(), post.request, post.keys)
    claim = unpack_surrogate(sent.payload).claim
    assert claim is not None
    assert claim.centre == centre_digest(unpack_public_mean(post.request.centre))
    # The folder of the coordinator is its own affair.
    assert str(tmp_path) not in post.request_file.read_text()
    assert metrics_of(post.learn())["sites"]["used"] == 3
