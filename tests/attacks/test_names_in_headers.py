"""Names that a parser of foreign bytes reads are distinct: one that stands twice would make a record
count twice. Every parser of the list of `make fuzz` is tried, so a new one is too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from benchmarks._fuzz_parser import Parser
from benchmarks._fuzz_parsers import parsers
from fedsurrogate.common import surrogate_pb2 as pb

KINDS: list[type[Message]] = [
    each for each in vars(pb).values() if isinstance(each, type) and issubclass(each, Message)
]
# What a part is named by.
NAMED = {"name", "site", "reader", "statistic"}
# A list of classes as JSON, perhaps as a text within JSON.
LISTED = re.compile(rb'(?:^|classes(?:\\*")+: ?(?:\\*")?)\[(?:\\*")[^]]*\]')
NAME = re.compile(rb'(\\*")([^",\\\[\]]+)\1(?=[,\]])')


def named_lists(message: Message) -> Iterator[tuple[list[str], Callable[[list[str]], None]]]:
    """All lists of names in a message, each with what replaces it: repeated texts, and the names of
    repeated parts.
    """
    for field, value in message.ListFields():
        parts = [
            each for each in (value if field.is_repeated else (value,)) if isinstance(each, Message)
        ]
        for each in parts:
            yield from named_lists(each)
        if field.is_repeated and field.type == field.TYPE_STRING:

            def replaced(names: list[str], value: Any = value) -> None:
                del value[:]
                value.extend(names)

            yield list(value), replaced
        elif field.is_repeated and parts and (own := NAMED & {*parts[0].DESCRIPTOR.fields_by_name}):

            def renamed(names: list[str], parts: Any = parts, key: str = min(own)) -> None:
                for each, name in zip(parts, names, strict=True):
                    setattr(each, key, name)

            yield [getattr(each, min(own)) for each in parts], renamed


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
        for kept, replace in named_lists(message):
            if message.SerializeToString(deterministic=True) != sample or len(kept) < 2:
                continue
            for wrong in wrong_lists(kept):
                replace(wrong)
                yield message.SerializeToString(deterministic=True)
            replace(kept)
    for found in LISTED.finditer(sample):
        named = list(NAME.finditer(found.group()))
        for other in named[1:]:
            # Of one length, as files state how long their parts are.
            if len(other.group(2)) == len(named[0].group(2)):
                start = found.start() + other.start(2)
                yield sample[:start] + named[0].group(2) + sample[start + len(other.group(2)) :]


# Lists of names that are none of theirs: the file of a site's own sums, the seed beside revealed
# shares, and surrogates in bytes, which another message may look like.
OTHERS = ("sum: state", "sum: spare", "relay")
TRIED: list[tuple[Parser, bytes]] = [
    (parser, parser.sealed(changed))
    for parser in parsers()
    if parser.name not in OTHERS
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
