"""Lines NAME=VALUE: what one reader takes, and what it refuses with file and line."""

from __future__ import annotations

import string
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.pacs import VARIABLES
from fedsurrogate.client_app.datasets.pacs import settings_of as let_in
from fedsurrogate.client_app.kit import KNOWN, read_kit
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.renamed import SETTING_LINES
from fedsurrogate.common.setting_lines import read_setting_lines
from fedsurrogate.server_app.deployment import federation

PLAIN = st.text(string.ascii_letters + string.digits + "/.,:_-'@%+= äß", max_size=20).filter(
    lambda text: not text.lstrip().startswith("'")
)


def written(folder: str | Path, text: str, mode: int = 0o600) -> Path:
    file = Path(folder, ".env")
    file.write_bytes(text.encode())
    file.chmod(mode)
    return file


@given(values=st.dictionaries(st.sampled_from(sorted(KNOWN)), PLAIN), mark=st.booleans())
def test_what_is_written_is_read_as_it_stands(values: dict[str, str], mark: bool) -> None:
    text = "\r\n".join(f"# {each}\n\n{each}={value}" for each, value in values.items())
    with TemporaryDirectory() as folder:
        file = written(folder, ("\ufeff" if mark else "") + text)
        assert read_setting_lines(file, KNOWN) == {k: v.strip() for k, v in values.items()}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("X=1", "'X' is no setting; there are A, B"),
        ("A", "'A' is no setting"),
        (" A=1", "' A' is no setting"),
        ("export A=1", "'export A' is no setting"),
        ("A=1\nA=2", "A stands there twice"),
        ('A="1"', "A has a quotation mark"),
        ("A='1'", "A has a quotation mark"),
        ("A=a\\b", "a backslash"),
        ("A=$HOME", "write values as they are"),
        ("A=1 # one", "comments on lines of their own"),
        ("A=#", "comments on lines of their own"),
        ("A=\x07", "a control character"),
    ],
)  # fmt: skip
def test_what_compose_would_read_otherwise_is_refused(
    tmp_path: Path, line: str, words: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{tmp_path}/.env', line \d: .*{words}".replace("$", r"\$")
    ):
        read_setting_lines(written(tmp_path, line), {"A", "B"})


def test_a_secret_has_any_sign_and_is_shown_in_no_error(tmp_path: Path) -> None:
    name, secret = VARIABLES["PASSWORD"], "p\"a'$s\\ #s"
    assert let_in({}, written(tmp_path, f"{name}={secret}"))["PASSWORD"] == secret
    with pytest.raises(ConfigError, match="chmod 600"):
        let_in({}, written(tmp_path, f"{name}={secret}", 0o640))
    for line in (secret, f"{secret}=x", f"{name}=1\n{name}={secret}", f"{name}={secret}\x07"):
        with pytest.raises(ConfigError) as found:
            let_in({}, written(tmp_path, line))
        assert "s\\" not in str(found.value)


def test_all_who_read_such_lines_have_this_reader(tmp_path: Path) -> None:
    """Each had its own rules before."""
    (tmp_path / "certificates").mkdir()
    (tmp_path / "certificates" / "ca.crt").touch()
    written(tmp_path, "COORDINATOR=fl.example.org:9092\nNOT_A_SETTING=1\n")
    for reader in (read_kit, federation.settings_of):
        with pytest.raises(ConfigError, match=r"line 2: 'NOT_A_SETTING' is no setting"):
            reader(tmp_path)
    written(tmp_path, "COORDINATOR=fl.example.org:9092\nGRAFANA_PASSWORD=x\n")
    for reader in (read_kit, federation.settings_of):
        reader(tmp_path)


def test_a_name_of_an_earlier_version_gives_the_new_one(tmp_path: Path) -> None:
    for old, new in SETTING_LINES.items():
        (tmp_path / ".env").write_text(f"{old}=/there\n")
        with pytest.raises(ConfigError, match=f"line 1: {old} is now {new};"):
            read_setting_lines(tmp_path / ".env", {new})
