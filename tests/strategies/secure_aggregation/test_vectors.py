"""The coordinator takes a masked vector only under the header that it has asked for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.surrogate_proto import pack_masked
from fedsurrogate.strategies.secure_aggregation.strategy import SecureAggregation

ASKED = Header("fedpft", "0" * 16, "coordinator", "f" * 16, ("benign", "malign", "other"))
TEXT = st.text("abf0", min_size=1, max_size=16)


def changed(field: str) -> st.SearchStrategy[Any]:
    """Other values of a field of the header; of classes also others in number and order."""
    if field != "classes":
        return TEXT
    names = st.sampled_from((*ASKED.classes, "rare"))
    return st.permutations(ASKED.classes).map(tuple) | st.lists(names, unique=True).map(tuple)


def coordinator() -> Any:
    """What the strategy needs to read a vector of `north`."""
    run = parse_run(
        {
            "secure-aggregation": True,
            "classes": ",".join(ASKED.classes),
            "fedpft.covariance": "gram",
        }
    )
    return SimpleNamespace(
        _header=ASKED,
        _shapes={"counts": (3,)},
        _subtracted="",
        _nodes={"north": 1},
        _masked={},
        _claims={},
        config=run,
        outcome=SimpleNamespace(sites={1: SimpleNamespace(simulated=False)}),
        recorder=SimpleNamespace(event=lambda *kind, **facts: None),
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_vector_under_another_header_is_not_summed(data: st.DataObject) -> None:
    fields = data.draw(
        st.lists(st.sampled_from(("method", "run", "site", "fingerprint", "classes")), unique=True)
    )
    own = replace(ASKED, site="north")
    header = replace(own, **{field: data.draw(changed(field)) for field in fields})
    read, payload = coordinator(), pack_masked(header, np.arange(3, dtype=np.uint32), None)
    if header == own:
        SecureAggregation._vector(read, "north", payload, {})
        assert read._masked["north"].tolist() == [0, 1, 2]
        return
    with pytest.raises(SurrogateError, match="another run, backbone, site or other classes"):
        SecureAggregation._vector(read, "north", payload, {})
    assert not read._masked


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_vector_of_another_length_is_not_summed(count: int) -> None:
    header, numbers = replace(ASKED, site="north"), np.zeros(count, np.uint32)
    with pytest.raises(SurrogateError):
        SecureAggregation._vector(coordinator(), "north", pack_masked(header, numbers, None), {})
