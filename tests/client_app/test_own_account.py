"""What belongs to a site's own account alone: arguments, settings, and the folder of the socket."""

import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app import clientapp
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.processes.own_account import own_folder, own_socket
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.common.wire.records import to_record
from fedsurrogate.server_app.deployment.submit import APP_FOLDER

NASTY = [
    "--node-config", "data-dir='/x y/ä'", "", "--", "a\nb", "\udcff", "$(x)", '"', "--runtime=1",
]  # fmt: skip
SHOWS = """
import json, pathlib, sys
from fedsurrogate.client_app.processes.own_account import take_arguments
take_arguments(2)
import os
line = pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\\0")[:-1]
print(json.dumps([sys.argv[1:], [each.decode() for each in line], dict(os.environ)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["-c", "file"])
def test_arguments_arrive_whole_and_stand_nowhere_that_others_read(
    how: str, tmp_path: Path
) -> None:
    file = tmp_path / "program"
    file.write_text(SHOWS)
    program = [sys.executable, "-P", *([how, SHOWS] if how == "-c" else [str(file)])]
    known = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
    done = subprocess.run(
        [*program, "join", *NASTY], env=known, capture_output=True, check=True, text=True
    )
    arguments, line, variables = json.loads(done.stdout)
    assert arguments == ["join", *NASTY]
    assert line == [*program, "join"]
    # Its children do not inherit them.
    assert set(variables) <= set(known) | {"LC_CTYPE"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "runtime"
    made.mkdir(parents=True)
    for each in (made.parent, made):
        each.chmod(0o700)
    return made


@pytest.mark.parametrize(
    ("of_folder", "above", "owner", "sound"),
    [
        (0o700, 0o700, -1, True),
        (0o755, 0o755, -1, True),
        (0o775, 0o755, -1, True),
        (0o700, 0o1777, -1, True),
        (0o702, 0o700, -1, False),
        # Sticky: another account may still make the socket first.
        (0o1777, 0o700, -1, False),
        (0o700, 0o777, -1, False),
        (0o700, 0o703, -1, False),
        (0o700, 0o700, 65534, False),
        (0o775, 0o700, 65534, False),
        # No folder there yet.
        (None, 0o755, -1, True),
        (None, 0o777, -1, False),
    ],
)
def test_a_socket_is_where_no_other_account_can_put_one(
    of_folder: int | None, above: int, owner: int, sound: bool, folder: Path
) -> None:
    if owner >= 0:
        if os.getuid() != 0:
            pytest.skip("only root gives a folder to another account")
        os.chown(folder, owner, owner)
    if of_folder is None:
        folder.rmdir()
    else:
        folder.chmod(of_folder)
    folder.parent.chmod(above)
    link = folder.parent.parent / "link"
    link.symlink_to(folder)
    for name in (folder, link):
        if sound:
            assert own_socket(f"unix:{name}/app") == f"unix:{folder}/app"
            assert stat.S_IMODE(folder.stat().st_mode) == (of_folder or 0o700)
        else:
            with pytest.raises(ConfigError, match="may replace files in"):
                own_socket(f"unix:{name}/app")


def test_a_folder_of_roots_that_a_foreign_group_may_write_is_refused(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root gives a folder to another group")
    os.chown(folder, 0, 65534)
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="may replace files in"):
        own_socket(f"unix:{folder}/app")


@pytest.mark.parametrize("runtime", ["127.0.0.1:9094", "[::1]:1", "localhost:0", "/run/app", ""])
def test_what_is_no_socket_is_refused(runtime: str) -> None:
    with pytest.raises(ConfigError, match="every user of this machine may open a port"):
        own_socket(runtime)


def test_a_site_that_joins_has_a_folder_of_its_own_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 90)))
    with own_folder() as first, own_folder() as second:
        assert first != second
        for each in map(Path, (first, second)):
            assert each.stat().st_mode & 0o777 == 0o700
            assert len(f"{each}/app.status") < 100
    assert not Path(first).exists()


OWN = (
    'site="north" data="imagefolder" data-dir="{0}/data" policy="{0}/policy.toml" '
    'state-dir="{0}/state" check-log-dir="{0}/check-log" cache-dir="{0}/cache" held-out-dir="{0}/held"'
)
KEYS = [name.replace("_", "-") for name in NodeConfig.model_fields]
# A value of every kind that some key takes, and others.
VALUES = st.one_of(
    st.sampled_from(
        ["", "south", "digits", "record", "cpu", "first", "python:a.b:c", "a,b", "study"]
    ),
    st.integers(-1, 200),
    st.booleans(),
    st.text(max_size=8),
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(clientapp, "_own_settings", None)
    (tmp_path / "policy.toml").write_text("")
    (tmp_path / "data").mkdir()
    return OWN.format(tmp_path)


def told(own: str, stated: dict[str, Any]) -> dict[str, Any]:
    """What the app of a site answers to a message that comes with these settings."""
    flower().local_run(7)
    asked = Message(to_record(None, {"run": "x"}), dst_node_id=7, message_type="query.name")
    context = Context(7, 1, stated, RecordDict(), {})
    reply = clientapp.app_at_site(own)(asked, context)
    return dict(reply.content["info"])  # type: ignore[arg-type]


def test_the_sites_own_settings_hold_and_any_other_statement_is_refused(
    own: str, tmp_path: Path
) -> None:
    flat = parse_overrides([own])
    elsewhere = tmp_path / "elsewhere"
    assert told(own, {})["status"] == "ok"
    # As a SuperNode of an earlier version states them, in any order.
    assert told(own, dict(reversed(flat.items())) | {"device": "auto"})["site"] == "north"
    places = st.just(str(elsewhere)) | VALUES
    changed = st.dictionaries(st.sampled_from([*KEYS, "other", "x.y"]), places)
    kept = st.sets(st.sampled_from(list(flat)))

    @settings(max_examples=300, deadline=None)
    @given(kept, changed)
    def refused(removed: set[str], new: dict[str, Any]) -> None:
        stated = {key: flat[key] for key in flat if key not in removed} | new
        assume(stated)
        with suppress(ConfigError):
            assume(parse_node_config(stated) != parse_node_config(flat))
        assert told(own, stated) == {"status": "config"}, "no value leaves, and no path"
        assert not elsewhere.exists()

    refused()
    log = (tmp_path / "state" / "site.log").read_text()
    assert "states other settings than this app was started with" in log


@pytest.mark.parametrize("key", ["policy", "state-dir", "data-dir", "check-log-dir", "site"])
def test_the_log_names_the_key_that_is_stated_otherwise(own: str, tmp_path: Path, key: str) -> None:
    told(own, parse_overrides([own]) | {key: "another"})
    last = (tmp_path / "state" / "site.log").read_text().splitlines()[-1]
    assert f"config: {key}: the SuperNode states other settings" in last


def test_a_site_that_runs_as_another_account_is_not_simulated_by_a_message(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context without data once made a process in which Ray runs tell the error's text."""
    monkeypatch.setattr(
        "fedsurrogate.client_app.features.site_features.in_simulation", lambda: True
    )
    assert told(own, {"partition-id": 3}) == {"status": "config"}
