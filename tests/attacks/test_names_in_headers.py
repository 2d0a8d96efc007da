"""Names that a parser of foreign bytes reads are distinct: one that stands twice would make a record
count twice. Every parser of the list of `make fuzz` is tried, so a new one is too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.message import DecodeError, Message

from benchmarks._fuzz_parser import Parser
from benchmarks._fuzz_parsers import parsers
from fedsurrogate.common import surrogate_pb2 as pb

KINDS: list[type[Message]] = [
    each for each in vars(pb).values() if isinstance(each, type) and issubclass(each, Message)
]
# A list of classes as JSON, perhaps as a text within JSON.
LISTED = re.compile(rb'(?:^|classes(?:\\*")+: ?(?:\\*")?)\[(?:\\*")[^]]*\]')
NAME = re.compile(rb'(\\*")([^",\\\[\]]+)\1(?=[,\]])')


def headers(message: Message) -> Iterator[pb.Header]:
    """All headers in a message."""
    for field, value in message.ListFields():
        for each in value if field.is_repeated else (value,):
            if isinstance(each, pb.Header):
                yield each
            elif isinstance(each, Message):
                yield from headers(each)


def wrong_lists(names: list[str]) -> Iterator[list[str]]:
    """Lists as long as a valid one that name a class twice, or one without a name."""
    for last in (names[0], f"{names[0]} ", "", "\u200b"):
        yield [*names[:-1], last]


def with_wrong_names(sample: bytes) -> Iterator[bytes]:
    """A message with such a list in each place where one is."""
    for kind in KINDS:
        message = kind()
        try:
            message.ParseFromString(sample)
        except DecodeError:
            continue
        for header in headers(message):
            kept = list(header.classes)
            if message.SerializeToString(deterministic=True) != sample or len(kept) < 2:
                continue
            for wrong in wrong_lists(kept):
                del header.classes[:]
                header.classes.extend(wrong)
                yield message.SerializeToString(deterministic=True)
            del header.classes[:]
            header.classes.extend(kept)
    for found in LISTED.finditer(sample):
        named = list(NAME.finditer(found.group()))
        for other in named[1:]:
            # Of one length, as files state how long their parts are.
            if len(other.group(2)) == len(named[0].group(2)):
                start = found.start() + other.start(2)
                yield sample[:start] + named[0].group(2) + sample[start + len(other.group(2)) :]


TRIED: list[tuple[Parser, bytes]] = [
    (parser, parser.sealed(changed))
    for parser in parsers()
    for sample in parser.samples
    for changed in with_wrong_names(sample)
]


def test_parsers_of_models_sums_counts_and_generators_are_tried() -> None:
    names = {parser.name for parser, _ in TRIED}
    wanted = {"surrogate", "model", "parameters", "counts", "sum: masked"}
    assert names >= wanted | {"model file", "generator", "signed model", "classes of a run"}


def test_a_name_that_stands_twice_or_is_none_is_refused_by_every_parser() -> None:
    read = []
    for parser, content in TRIED:
        try:
            parser.parse(content)
        except parser.allowed:
            continue
        read.append(parser.name)
    assert not read
