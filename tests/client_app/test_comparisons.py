"""A comparison asks for baselines unless the coordinator wants to know the model's accuracy alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.client_app import requests
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.common.run import parse_run


@pytest.mark.parametrize(
    ("info", "baselines"),
    [({}, True), ({"brief": False}, True), ({"brief": True}, False), ({"brief": 1}, True)],
)
@pytest.mark.parametrize("method", ["fedpft", "local", "counting"])
def test_baselines_are_left_out_of_a_brief_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, info: Any, baselines: bool, method: str
) -> None:
    own: dict[str, Any] = {"method": method}
    if method == "counting":
        own = {"counting.kind": "survey", "classes": "a,b"}
    run, asked = parse_run(own), []
    node: Any = SimpleNamespace(state=tmp_path)

    def compare(model: Any, given: Any, site: Any, **more: bool) -> dict[str, Any]:
        assert (given, site) == (run, node)
        asked.append((model, more))
        return {"accuracy.model": 0.5}

    monkeypatch.setattr(requests, "compare", compare)
    monkeypatch.setattr(requests, "check_comparable", lambda given: asked.append(given))
    monkeypatch.setattr(requests, "received_classifier", lambda payload, digest: (payload, digest))
    monkeypatch.setattr(requests, "own_classifier", lambda job: ("own", job.payload, job.site))
    monkeypatch.setattr(requests, "load_site", lambda *given: None)
    request = SiteRequest(run, node, "s0", payload=b"model", info=info)
    gate: Any = SimpleNamespace(policy=SimpleNamespace(cache_mib=1))
    assert requests._comparison(request, gate) == (None, {"accuracy.model": 0.5})
    # What a run that counts evaluates is the model of another run.
    model: Any = (b"model", "" if method == "counting" else run.digest)
    if method == "local":
        model = ("own", b"model", "s0")
    assert asked == [node, (model, {"baselines": baselines})]
