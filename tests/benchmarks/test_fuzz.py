"""The registry of parsers of foreign bytes: it is complete, its samples are valid, and a few changed
ones of each keep the rules. `make fuzz` tries millions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from benchmarks import fuzz
from benchmarks._fuzz_limits import ACCEPTED, REFUSED, in_child, limited
from benchmarks._fuzz_own import OWN
from benchmarks._fuzz_parser import Parser
from benchmarks._fuzz_parsers import parsers
from fedsurrogate.common.errors import SurrogateError

ROOT = Path(__file__).parents[2]
ROOMS = ("common", "client_app", "strategies", "server_app", "fedsurrogate")
# Calls that make a structure of bytes or text; and the modules whose functions all do.
READERS = {
    *(
        "ParseFromString",
        "FromString",
        "MergeFromString",
        "read_message",
        "json.loads",
        "json.load",
    ),
    *("tomllib.loads", "tomllib.load", "model_validate_json", "safe_open", "torch.load", "np.load"),
    *("np.loadtxt", "np.frombuffer", "b64decode", "fromhex", "Image.open", "dcmread"),
    *("pq.ParquetFile", "pq.read_table", "csv.reader", "csv.DictReader", "read_csv"),
    *("struct.unpack", "load_pem_x509_certificate", "load_der_x509_certificate"),
    *("load_pem_private_key", "load_ssh_private_key", "load_ssh_public_key", "ZipFile"),
    # Graphs: only those that this program has just written are read.
    *("jit.load", "export.load", "onnx.load", "InferenceSession"),
    *("bytes_to_public_key", "tarfile.open", "unpack_archive", "pickle.loads", "yaml.safe_load"),
}
READING_MODULES = ("safetensors.torch", "surrogate_proto")
# And what of these modules reads no bytes: writers, a type, and checks of what was read.
WRITERS, DIGESTS = ("save", "save_file", "pack_", "Counts", "check_"), "_digest"
FEW = 8
DEEP = 100_000


@pytest.fixture(scope="module")
def registry() -> list[Parser]:
    return list(fuzz.warmed(parsers()))


def readers(source: str) -> set[str]:
    """Qualified names of the functions in a source that call a reader."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(READING_MODULES)
        for alias in node.names
        if not alias.name.startswith(WRITERS) and not alias.name.endswith(DIGESTS)
    }
    return {
        name
        for function, name in _functions(tree, "")
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _reads(ast.unparse(node.func), imported)
    }


def _reads(call: str, imported: set[str]) -> bool:
    return call in imported or any(call == each or call.endswith(f".{each}") for each in READERS)


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, f"{prefix}{node.name}"
        inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
        if not isinstance(node, ast.FunctionDef):
            yield from _functions(node, inner)


def parsing() -> set[str]:
    """Every function of the product that parses, as path:name."""
    return {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if not path.name.endswith("_pb2.py")
        for name in readers(path.read_text())
    }


def executed(registry: list[Parser]) -> set[str]:
    """Every function of the product that runs while the samples are parsed, as path:name."""
    codes = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        for parser in registry:
            for sample in parser.samples:
                parser.parse(parser.sealed(sample))
    finally:
        sys.setprofile(None)
    return {
        f"{Path(code.co_filename).resolve().relative_to(ROOT).as_posix()}:{code.co_qualname}"
        for code in codes
        if code.co_filename.startswith(str(ROOT))
    }


def test_every_function_that_parses_is_fuzzed_or_reads_nobody_elses_bytes(
    registry: list[Parser],
) -> None:
    everything, ran = parsing(), executed(registry)
    listed = {name for names in OWN.values() for name in names}
    assert not (missing := everything - ran - listed), (
        f"{sorted(missing)}: add a parser with samples to benchmarks/_fuzz_parsers.py, or the "
        "reason why its bytes are nobody else's to benchmarks/_fuzz_own.py"
    )
    assert not (gone := listed - everything), f"{sorted(gone)} parse nothing any more"
    assert not (both := listed & ran), f"{sorted(both)} are fuzzed, so no reason is needed"


def test_changed_messages_are_refused_in_one_way_and_in_little_memory(
    registry: list[Parser],
) -> None:
    findings = fuzz.Findings()
    cases = [(parser, number) for parser in registry for number in range(FEW)]
    outcomes = in_child(partial(fuzz.outcome_of, parser, 0, number) for parser, number in cases)
    for (parser, number), outcome in zip(cases, outcomes, strict=True):
        findings.note(parser.name, number, outcome)
    assert not findings.first, findings.table()
    # Changes that are always refused at the door, or never, would test nothing.
    for kind in (ACCEPTED, REFUSED):
        which = {name for name, seen in findings.seen.items() if seen[kind]}
        assert len(which) > 0.8 * len(registry), sorted(findings.seen.keys() - which)


def deep(sample: bytes) -> list[bytes]:
    """Text with more brackets than a parser may make calls: alone, and as one value of a sample."""
    whole = b"[" * DEEP + b"]" * DEEP
    texts = [b"[" * DEEP, whole, b'{"a":' * DEEP, b"a = " + whole]
    return texts + [sample[:-1] + b', "more": ' + whole + b"}"] * sample.endswith(b"}")


def test_text_of_many_brackets_is_refused_like_any_other_damage(registry: list[Parser]) -> None:
    """Python's parsers call themselves for each bracket, and then raise RecursionError."""
    cases = [
        (parser, content)
        for parser in registry
        for sample in parser.samples[:1]
        for content in deep(sample.rstrip())
    ]
    outcomes = in_child(
        partial(limited, parser.parse, parser.allowed, content) for parser, content in cases
    )
    ends = [(parser.name, end) for (parser, _), end in zip(cases, outcomes, strict=False)]
    assert not {each for each in ends if each[1] not in (ACCEPTED, REFUSED)}
    assert len(ends) == len(cases)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (lambda content: bytes(2**28), "memory"),
        (lambda content: {}[content], "KeyError"),
        (lambda content: (_ for _ in ()).throw(ValueError("x")), "ValueError"),
    ],
)
def test_a_planted_fault_is_found(registry: list[Parser], fault: object, found: str) -> None:
    parser = Parser(
        "planted",
        fault,
        (SurrogateError,),
        registry[0].samples,
        registry[0].change,  # type: ignore[arg-type]
    )
    findings = fuzz.Findings()
    fuzz.run_batch(parser, 0, 0, 3, findings)
    assert [found in what for _, what in findings.first] == [True]
    assert "planted, case 0" in findings.table()
