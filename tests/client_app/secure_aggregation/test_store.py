"""States of secure aggregation on disk: each name begins once, and only old ones are removed."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import StateError, SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import PHASES, begin
from fedsurrogate.common.secure_aggregation.rules import context_of
from fedsurrogate.common.security.sealing import new_key

RUN = parse_run({"classes": "a,b", "secure-aggregation": True, "fedpft.covariance": "gram"})
NAMES = [digit * 32 for digit in "0123"]


def node_in(folder: Path) -> NodeConfig:
    return parse_node_config({"site": "north", "state-dir": str(folder)})


@settings(max_examples=20)
@given(
    ages=st.lists(st.sampled_from((0, 40, 90, 5000)), max_size=3), limit=st.sampled_from((60, 100))
)
def test_a_new_sum_removes_the_states_that_are_older_than_a_run_may_be(
    tmp_path_factory: pytest.TempPathFactory, ages: list[int], limit: int
) -> None:
    node = node_in(tmp_path_factory.mktemp("site"))
    policy = Policy(most_seconds=limit)
    states = {}
    for name, age in zip(NAMES, ages, strict=False):
        states[name], _ = begin("north", new_key(), context_of(RUN, name))
        secure_aggregation.create_state(node, Policy(), name, states[name])
        moment = time.time() - age
        os.utime(secure_aggregation.state_file(node, name, "north"), (moment, moment))
    secure_aggregation.create_state(node, policy, NAMES[3], begin("north", new_key(), b"")[0])
    for name, age in zip(NAMES, ages, strict=False):
        if age > limit:
            with pytest.raises(StateError, match="no state"):
                secure_aggregation.read_state(RUN, node, name, "north")
            continue
        assert secure_aggregation.read_state(RUN, node, name, "north") == states[name]
        with pytest.raises(StateError, match="has begun"):
            secure_aggregation.create_state(node, policy, name, states[name])
        assert secure_aggregation.read_state(RUN, node, name, "north") == states[name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS, errno.ENOENT])
@pytest.mark.parametrize("step", ["open", "fsync"])
def test_a_state_that_cannot_be_written_is_an_error_that_names_the_folder_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(secure_aggregation, "os", SimpleNamespace(**vars(os) | {step: fails}))
        with pytest.raises(StateError, match="see state-dir"):
            secure_aggregation.create_state(
                node_in(tmp_path), Policy(), NAMES[0], begin("north", new_key(), b"")[0]
            )


@settings(max_examples=20)
@given(
    phase=st.sampled_from(PHASES),
    wrong=st.sampled_from(("", "name", "site", "settings", "phase of another site")),
)
def test_a_state_is_read_only_for_its_own_sum_site_and_settings(
    tmp_path_factory: pytest.TempPathFactory, phase: str, wrong: str
) -> None:
    node, name = node_in(tmp_path_factory.mktemp("site")), NAMES[0]
    state, _ = begin("north", new_key(), context_of(RUN, name))
    secure_aggregation.create_state(node, Policy(), name, state)
    state = replace(state, phase=phase)  # type: ignore[arg-type]
    secure_aggregation.write_state(node, name, state)
    other = parse_run({"classes": "a,b,c", "secure-aggregation": True, "fedpft.covariance": "gram"})
    asked = {
        "": (RUN, name, "north"),
        "name": (RUN, NAMES[1], "north"),
        "site": (RUN, name, "south"),
        "settings": (other, name, "north"),
        "phase of another site": (RUN, name, "south"),
    }
    if wrong == "phase of another site":
        # The file under another name does not make it another site's.
        secure_aggregation.state_file(node, name, "north").rename(
            secure_aggregation.state_file(node, name, "south")
        )
    elif wrong == "name":
        secure_aggregation.state_file(node, name, "north").rename(
            secure_aggregation.state_file(node, NAMES[1], "north")
        )
    run, asked_name, site = asked[wrong]
    if not wrong:
        assert secure_aggregation.read_state(run, node, asked_name, site) == state
    else:
        with pytest.raises(StateError):
            secure_aggregation.read_state(run, node, asked_name, site)


@given(st.text(max_size=40) | st.text("0123456789abcdef", min_size=31, max_size=33))
def test_only_a_name_of_its_form_names_a_sum(name: str) -> None:
    if len(name) == 32 and set(name) <= set("0123456789abcdef"):
        assert secure_aggregation.sum_name({"sum": name}) == name
    else:
        with pytest.raises(SurrogateError, match="without the name"):
            secure_aggregation.sum_name({"sum": name})


def test_a_first_state_is_on_the_disk_before_the_step_that_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, a sum of this name must not begin a second time with other keys."""
    node, flushed = node_in(tmp_path), []
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor))
        flush(descriptor)

    monkeypatch.setattr(secure_aggregation.os, "fsync", fsync)
    secure_aggregation.create_state(node, Policy(), NAMES[0], begin("north", new_key(), b"")[0])
    written = secure_aggregation.state_file(node, NAMES[0], "north").stat()
    assert [(each.st_ino, each.st_size) for each in flushed] == [(written.st_ino, written.st_size)]
    assert written.st_mode & 0o777 == 0o600
