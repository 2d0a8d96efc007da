"""Fuzzing of every parser of foreign bytes: each refuses what is not valid with its one kind of
exception, in memory in proportion to its bytes, and in seconds.

Valid messages are changed at random, field by field (`_fuzz_mutations.py`), and get valid
signatures again, so that changes reach what comes after them. Each is parsed in a child process
with a limit on its memory (`_fuzz_limits.py`). A seed and a number give the same case again:
`python benchmarks/fuzz.py --only surrogate --seed 1 --case 1234`. Prints a table; exits with 1 if
there is a finding.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks._fuzz_limits import ACCEPTED, REFUSED, in_child, limited
from benchmarks._fuzz_parser import Parser
from benchmarks._fuzz_parsers import parsers

BATCH = 200


class Findings:
    """What was seen of each parser.

    Attributes:
        seen: number of cases by parser and outcome.
        first: number of the first case, by parser and finding.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Counter[str]] = {}
        self.first: dict[tuple[str, str], int] = {}

    def note(self, parser: str, number: int, outcome: str) -> None:
        """Count the outcome of one case."""
        self.seen.setdefault(parser, Counter())[outcome] += 1
        if outcome not in (ACCEPTED, REFUSED) and (parser, _kind(outcome)) not in self.first:
            self.first[parser, _kind(outcome)] = number
            print(f"found: {parser}, case {number}: {_kind(outcome)}", flush=True)

    def table(self) -> str:
        """A line for each parser, then a line for each finding."""
        lines = [f"{'parser':28} {'cases':>8} {'accepted':>9} {'refused':>9} {'findings':>9}"]
        for name, seen in self.seen.items():
            total, accepted, refused = seen.total(), seen[ACCEPTED], seen[REFUSED]
            rest = total - accepted - refused
            lines.append(f"{name:28} {total:8} {accepted:9} {refused:9} {rest:9}")
        found = [f"{name}, case {at}: {what}" for (name, what), at in self.first.items()]
        return "\n".join([*lines, *found])


def _kind(outcome: str) -> str:
    """A finding without what differs from case to case."""
    return outcome[:120].split(": ")[0] if " line " in outcome else outcome


def run_batch(parser: Parser, seed: int, start: int, count: int, findings: Findings) -> None:
    """Parse `count` cases from number `start` on, in child processes.

    Args:
        parser: of the registry.
        seed: of all cases.
        start: number of the first case.
        count: of cases.
        findings: are added to.
    """
    at, end = start, start + count
    while at < end:
        calls = [partial(outcome_of, parser, seed, number) for number in range(at, end)]
        outcomes = in_child(calls)
        if not outcomes:
            raise RuntimeError(f"{parser.name}: no case of {at} to {end} could be made")
        for outcome in outcomes:
            findings.note(parser.name, at, outcome)
            at += 1


def outcome_of(parser: Parser, seed: int, number: int) -> str:
    """The outcome of one case, in this process, which must be a child."""
    return limited(parser.parse, parser.allowed, parser.case(seed, number))


def warmed(chosen: Sequence[Parser]) -> Sequence[Parser]:
    """The parsers, after each has parsed its samples: what it imports then is not counted later.

    Raises:
        RuntimeError: for a sample that is not valid.
    """
    torch.set_num_threads(1)
    for parser in chosen:
        for number, sample in enumerate(parser.samples):
            try:
                parser.parse(parser.sealed(sample))
            except Exception as error:
                raise RuntimeError(f"{parser.name}: sample {number} is refused") from error
    return chosen


def fuzz(chosen: Sequence[Parser], seed: int, minutes: float) -> Findings:
    """Parse changed messages of all parsers in turn, for so many minutes of processor time."""
    findings, start = Findings(), 0
    while sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) < 60 * minutes:
        for parser in chosen:
            run_batch(parser, seed, start, BATCH, findings)
        start += BATCH
        spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / 60
        print(f"{start} cases of each, {spent:.1f} minutes, {len(findings.first)} findings")
    return findings


def main() -> int:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0, help="of processor time")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="name of one parser")
    options.add_argument("--case", type=int, help="number of one case of it, whose error is shown")
    given = options.parse_args()
    every = parsers()
    chosen = [each for each in every if given.only in ("", each.name)]
    if not chosen:
        names = ", ".join(each.name for each in every)
        options.error(f"--only {given.only!r} is no parser; these are: {names}")
    warmed(chosen)
    if given.case is not None:
        content = chosen[0].case(given.seed, given.case)
        print(f"{len(content)} bytes: {content[:2000]!r}")
        print(chosen[0].parse(content))
        return 0
    findings = fuzz(chosen, given.seed, given.minutes)
    print(findings.table())
    return int(bool(findings.first))


if __name__ == "__main__":
    sys.exit(main())
