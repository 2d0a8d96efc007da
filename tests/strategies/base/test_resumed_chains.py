"""A resumed chain over generated histories: whoever has not passed on a relay is asked, the skipped
ones last, and nobody twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.base.chain import RELAY, STATE, Walk
from fedsurrogate.strategies.base.identifications import Group
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.fedpft.strategy import FedPFTChain

few = settings(max_examples=60, deadline=None)


@few
@given(
    order=st.permutations("abcdef"),
    history=st.lists(st.sampled_from(["done", "skipped"]), max_size=6),
    there=st.sets(st.sampled_from("abcdef")),
)
def test_every_site_without_a_relay_has_its_turn_again(
    order: list[str], history: list[str], there: set[str]
) -> None:
    past = dict(zip(order, history, strict=False))
    done, skipped = (
        [name for name in order if past.get(name) == kind] for kind in ("done", "skipped")
    )
    with TemporaryDirectory() as folder:
        config = parse_run({"fedpft.topology": "chain", "resume": folder})
        walk = Walk(list(order), done, skipped, run=config.digest)
        (Path(folder) / STATE).write_text(json.dumps(vars(walk)))
        (Path(folder) / RELAY).write_bytes(b"")
        chain = FedPFTChain(config)
        chain.outcome.sites = {node: Site(name) for node, name in enumerate(order)}
        nodes = {name: node for node, name in enumerate(order) if name in there}
        resumed, _ = chain._begin(Group(nodes=nodes))
    untouched = [name for name in order if name not in past]
    assert resumed.left == [name for name in [*untouched, *skipped] if name in there]
    assert resumed.done == done
    assert set(resumed.skipped) == set(order) - set(done) - there
    assert resumed.hop == len(done) + len(resumed.skipped) + 1
