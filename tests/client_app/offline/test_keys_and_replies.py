"""Keys of a site, and replies by file, with the answer itself replaced: what is read, what is kept, and
when an answer is begun.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline import answers as replies
from fedsurrogate.client_app.offline.answers import is_message, reply_to
from fedsurrogate.client_app.offline.keys import coordinator_key, private_key, received_keys
from fedsurrogate.common.errors import ConfigError, SealError, StateError
from fedsurrogate.common.message_files import (
    MessageRequest,
    digest,
    pack_request,
    unpack_reply,
)
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.wire.records import from_record, to_record

COORDINATOR = bytes(range(32))
PUBLIC = public_key(COORDINATOR)
REQUEST = MessageRequest(
    "a1" * 32, "17", "north", "train", {"seed": 5}, {"round": 2, "bytes": 5}, "2999-01-01", b"model"
)


def test_a_key_is_made_once_for_each_name(tmp_path: Path) -> None:
    node = NodeConfig(state_dir=str(tmp_path / "state"))
    own = private_key(node, "north")
    assert len(own) == 32
    assert private_key(node, "north") == own != private_key(node, "south")
    assert (tmp_path / "state" / "keys" / "north.key").read_bytes() == own


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_size_is_damaged(tmp_path: Path, size: int) -> None:
    file = tmp_path / "keys" / "north.key"
    file.parent.mkdir()
    file.write_bytes(bytes(size))
    with pytest.raises(SealError, match=r"north\.key' is damaged; remove it"):
        private_key(NodeConfig(state_dir=str(tmp_path)), "north")


def test_a_place_without_room_for_a_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"")
    with pytest.raises(SealError, match=r"north\.key' cannot be used .*see state-dir"):
        private_key(NodeConfig(state_dir=str(tmp_path)), "north")


def test_received_keys_are_those_of_one_size_that_the_peers_confirm(tmp_path: Path) -> None:
    keys = {name: public_key(new_key()) for name in ("east", "north", "south", "west")}
    sent: dict[str, Any] = {name: key.hex() for name, key in keys.items()}
    sent |= {"short": "ab" * 63, "long": "ab" * 65, "half": "ab" * 32, "number": 5, "none": None}
    assert received_keys(NodeConfig(), json.dumps(sent)) == keys
    known = {"north": keys["north"], "west": public_key(new_key()), "other": keys["south"]}
    file = tmp_path / "peers.toml"
    file.write_text("\n".join(f'{name} = "{key.hex()}"' for name, key in known.items()))
    node = NodeConfig(peers=str(file))
    assert received_keys(node, json.dumps(sent)) == {"north": keys["north"]}


@pytest.mark.parametrize("text", ["", "5", "[1]", '{"a": 1', "[" * 100_000, None, {"x": "zz" * 64}])
def test_keys_that_cannot_be_read_are_refused(text: object) -> None:
    sent = json.dumps(text) if isinstance(text, dict) else text
    with pytest.raises(SealError, match="keys of other sites in the request cannot be read"):
        received_keys(NodeConfig(), sent)


def test_the_coordinators_key_is_given_or_in_a_file_with_nothing_else(tmp_path: Path) -> None:
    text, file = PUBLIC.hex(), tmp_path / "coordinator.pub"
    assert coordinator_key(NodeConfig(coordinator_key=text)) == PUBLIC
    named = NodeConfig(coordinator_key=str(file))
    for content in (text, f"\n {text}\r\n", text + " " * (4096 - len(text))):
        file.write_text(content)
        assert coordinator_key(named) == PUBLIC
    # Of a file, 4096 bytes are read.
    file.write_text(text + " " * (4096 - len(text)) + "x")
    assert coordinator_key(named) == PUBLIC
    for content in (text[1:], text + "0", f"{text} x", text + " " * (4095 - len(text)) + "x", ""):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"pub': must hold 128 hexadecimal digits"):
            coordinator_key(named)
    file.write_bytes(b"\xff" * 128)
    with pytest.raises(ConfigError, match="must hold 128 hexadecimal digits"):
        coordinator_key(named)


@pytest.mark.parametrize("place", ["nowhere", "~no-such-user-here/key", "a\0b", "."])
def test_a_coordinators_key_that_is_no_file_is_named(place: str) -> None:
    with pytest.raises(ConfigError, match="is neither a key nor a readable file"):
        coordinator_key(NodeConfig(coordinator_key=place))


def test_a_site_without_a_coordinators_key_answers_no_file() -> None:
    with pytest.raises(ConfigError, match="has no key of the coordinator"):
        coordinator_key(NodeConfig())


def test_a_message_is_known_by_its_first_byte(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content, known in ((b"\n", True), (b"\nab", True), (b"", False), (b"f\n", False)):
        file.write_bytes(content)
        assert is_message(file) is known
    with pytest.raises(ConfigError, match="it is no file"):
        is_message(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere cannot be read \(No such file"):
        is_message(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be read \(Not a directory\)"):
        is_message(file / "below")


class Answers:
    """The answers of a site, of which each charges once."""

    def __init__(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        self.node = NodeConfig(
            site="north", state_dir=str(home / "state"), coordinator_key=PUBLIC.hex()
        )
        self.asked: list[Any] = []
        self.entries = [{"flower_run": "16"}]
        self.home = home
        patch.setattr(replies, "answer", self.answer)
        patch.setattr(
            replies, "own_ledger", lambda node: SimpleNamespace(entries=lambda: self.entries)
        )

    def answer(self, work: str, record: Any, *others: Any) -> Any:
        mark = self.node.state / "replies" / f"{REQUEST.id}.begun"
        self.asked.append((work, *from_record(record, 99), mark.read_bytes(), *others))
        self.entries.append({"flower_run": "17"})
        return to_record(b"surrogate", {"records": 4, "bytes": 9})

    def write(self, request: MessageRequest = REQUEST) -> Path:
        file = self.home / "asked"
        file.write_bytes(pack_request(request, COORDINATOR))
        return file


def test_a_reply_names_its_request_and_is_made_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked, first, second = site.write(), tmp_path / "first", tmp_path / "second"
    line = reply_to(first, asked, site.node)
    assert line == f"{first}: reply to step 'train'; `site ledger show` shows what has been charged"
    (seen,) = site.asked
    assert seen == (
        "surrogate",
        b"model",
        {"round": 2, "bytes": 5},
        b"0",
        {"seed": 5},
        "17",
        site.node,
        "north",
    )
    own = public_key(private_key(site.node, "north"))
    found = unpack_reply(first.read_bytes(), own)
    assert (found.id, found.request, found.site) == (
        REQUEST.id,
        digest(asked.read_bytes()),
        "north",
    )
    assert (found.payload, found.info) == (b"surrogate", {"records": 4, "bytes": 9})
    assert (site.node.state / "replies" / REQUEST.id).read_bytes() == first.read_bytes()
    again = reply_to(second, asked, site.node)
    assert again.startswith(f"{second}: the reply that was made before; nothing is charged again;")
    assert second.read_bytes() == first.read_bytes()
    assert len(site.asked) == 1
    with pytest.raises(ConfigError, match="first' exists, and a reply is never replaced"):
        reply_to(first, asked, site.node)
    # Another request of this id is not answered with it; nor is the expired one made anew.
    with pytest.raises(StateError, match="another request with the id of"):
        reply_to(tmp_path / "third", site.write(replace(REQUEST, kind="evaluate")), site.node)
    old = replace(REQUEST, id="b2" * 32, expires="2001-02-03")
    with pytest.raises(ConfigError, match="expired on 2001-02-03; ask the coordinator"):
        reply_to(tmp_path / "third", site.write(old), site.node)
    assert not (tmp_path / "third").exists()


def test_an_answer_whose_reply_was_lost_is_made_again_only_if_nothing_was_charged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked, kept = site.write(), site.node.state / "replies" / REQUEST.id
    mark = kept.with_suffix(".begun")
    # Two charges of an earlier step of the run; the power failed before this one.
    site.entries += [{"flower_run": "17"}, {"flower_run": "17"}]
    kept.parent.mkdir(parents=True)
    mark.write_bytes(b"2")
    reply_to(tmp_path / "first", asked, site.node)
    assert (mark.read_bytes(), len(site.asked)) == (b"2", 1)
    kept.unlink()
    with pytest.raises(StateError, match=r"request a1a1a1a1a1a1 was answered and charged"):
        reply_to(tmp_path / "second", asked, site.node)
    assert len(site.asked) == 1
    # Without a mark, the charges are those of other steps.
    mark.unlink()
    reply_to(tmp_path / "second", asked, site.node)
    assert mark.read_bytes() == b"3"
    monkeypatch.setattr(replies, "own_ledger", lambda node: None)
    kept.unlink()
    mark.unlink()
    reply_to(tmp_path / "third", asked, site.node)
    assert mark.read_bytes() == b"0"


def test_a_request_for_another_site_or_of_a_site_without_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="is for site 'south', and this is 'north'"):
        reply_to(out, site.write(replace(REQUEST, site="south")), site.node)
    for nameless in (NodeConfig(), NodeConfig(num_partitions=1)):
        with pytest.raises(ConfigError, match="names no site"):
            reply_to(out, site.write(), nameless)
    part = site.node.model_copy(update={"site": "", "partition_id": 1, "num_partitions": 2})
    reply_to(out, site.write(replace(REQUEST, site="1")), part)
    assert site.asked[0][-1] == "1"


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("train", "surrogate"), ("evaluate", "evaluation"), ("query.hello", "identification"),
        ("query.sum_shares", "sum-shares"), ("query.name", "name"), ("query.comparison", ""),
        ("query.other", ""), ("hello", ""),
    ],
)  # fmt: skip
def test_a_kind_of_message_is_a_work_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, work: str
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked = site.write(replace(REQUEST, kind=kind))
    if work:
        reply_to(tmp_path / "out", asked, site.node)
    else:
        with pytest.raises(ConfigError, match=f"kind '{kind}', which this site does not answer"):
            reply_to(tmp_path / "out", asked, site.node)
    assert [seen[0] for seen in site.asked] == [work] * bool(work)


def test_values_that_no_network_carries_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked = site.write()
    for error in (TypeError("of a kind"), ValueError("of a size")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(replies, "to_record", fail)
        with pytest.raises(ConfigError, match=rf"no message over the network may have \({error}\)"):
            reply_to(tmp_path / "out", asked, site.node)
    assert site.asked == []


def test_a_request_may_have_the_largest_size_and_no_byte_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked = site.write()
    size = asked.stat().st_size
    monkeypatch.setattr(replies, "LARGEST_FILE", size - 1)
    with pytest.raises(ConfigError, match=f"asked is larger than the limit of {size - 1} bytes"):
        reply_to(tmp_path / "out", asked, site.node)
    monkeypatch.setattr(replies, "LARGEST_FILE", size)
    reply_to(tmp_path / "out", asked, site.node)


def test_a_charged_reply_is_written_where_its_copy_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked, out, write = site.write(), tmp_path / "out", replies.replace_file
    kept = site.node.state / "replies" / REQUEST.id

    def full(file: Path, content: bytes) -> None:
        if file == kept:
            raise PermissionError(13, "Denied")
        write(file, content)

    monkeypatch.setattr(replies, "replace_file", full)
    with pytest.raises(StateError, match=r"out is written; its copy .* is not \(Denied\): keep it"):
        reply_to(out, asked, site.node)
    own = public_key(private_key(site.node, "north"))
    assert unpack_reply(out.read_bytes(), own).payload == b"surrogate"
    assert asked.read_bytes() == pack_request(REQUEST, COORDINATOR)


def test_a_reply_that_has_no_room_is_kept_for_the_next_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Answers(monkeypatch, tmp_path)
    asked = site.write()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"below' cannot be written \(.*\); free the disk"):
        reply_to(tmp_path / "file" / "below", asked, site.node)
    reply_to(tmp_path / "out", asked, site.node)
    assert len(site.asked) == 1
