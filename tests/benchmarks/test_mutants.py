"""The generator of faults: each is a fault, seeds decide, ids stay, and the score is right."""

import ast
import importlib
import importlib.util
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import _executed, _mutations, _operators, _planting
from benchmarks import mutants as harness
from benchmarks.mutants import FAR, PACKAGES, ROOMS, Journal, Tree, Tried, in_order, show, trusted
from tests.children import ran
from tests.grid import ROOT

TREE = Tree(ROOT, PACKAGES, ROOMS)
# Every operator finds something here.
SAMPLE = """
def spend(records: int, patients: int, most: int = 5, **rest: int) -> float:
    if records > most and patients:
        raise ValueError("too many records")
    total = 0
    for at in range(records):
        total += at * rest["cost"] + patients**2
    if total in rest and not patients:
        return 0
    try:
        total = abs(total) << 3
        send(total)
        note(most)
    except (OSError, ValueError):
        return charge(patients, records)
    except OSError:
        return total * 8
    return max(total, patients) + sum(rest[1:2])


def charge(one: int, two: int) -> None:
    send(one)
    send(two)
"""
ALL = {
    "arguments swapped", "boundary", "call dropped", "call removed", "check removed", "condition dropped", "constant",
    "default", "early return", "exception narrowed", "factor", "factor dropped", "negation", "order", "slice",
    "term dropped", "unit",
}  # fmt: skip


ALONE = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def drawn(source: str, seed: int = 0) -> list[_mutations.Mutant]:
    """Up to fifty faults of a file."""
    return _mutations.draw({"one": {"a.py": source}}, facts_of(source), 50, seed)


def kinds(source: str) -> set[str]:
    return {each.operator for each in drawn(source)}


def in_folder(root: Path, *words: str) -> tuple[int, str, Any]:
    """What the command finds in a folder: its exit code, what it prints, and its results."""
    output = root / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "mutants.py"), "--root", str(root)]
    done = ran([*command, *words, "--jobs", "1", "--output", str(output)], env=ALONE)
    assert output.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(output.read_text())


def facts_of(*sources: str) -> _operators.Facts:
    return _operators.facts_of([ast.parse(source) for source in sources])


def test_every_operator_gives_source_that_compiles_and_differs() -> None:
    facts = facts_of(SAMPLE)
    found = _mutations.mutants("some.py", SAMPLE, facts)
    assert {each.operator for each in found} == ALL
    for each in found:
        after = _mutations.planted(SAMPLE, each.number, facts)
        compile(after, "", "exec")
        assert ast.dump(after) != ast.dump(ast.parse(SAMPLE)), each


@settings(max_examples=5)
@given(st.data())
def test_what_is_drawn_from_the_packages_compiles_to_something_else(data: st.DataObject) -> None:
    package = data.draw(st.sampled_from(PACKAGES))
    file, text = data.draw(st.sampled_from(sorted(TREE.sources(package).items())))
    facts = facts_of(text)
    for each in _mutations.draw({"one": {file: text}}, facts, 4, data.draw(st.integers(0, 99))):
        after = compile(_mutations.planted(text, each.number, facts), "", "exec")
        assert ast.unparse(_mutations.planted(text, each.number, facts)) != ast.unparse(
            ast.parse(text)
        )
        assert after is not None


@settings(max_examples=5)
@given(st.integers(0, 1000), st.integers(3, 20))
def test_a_seed_decides_the_draw(seed: int, count: int) -> None:
    sources, facts = {"one": {"some.py": SAMPLE}}, facts_of(SAMPLE)
    drawn = _mutations.draw(sources, facts, count, seed)
    assert drawn == _mutations.draw(sources, facts, count, seed)
    assert len({each.id for each in drawn}) == count
    assert drawn != _mutations.draw(sources, facts, count, seed + 1)


@settings(max_examples=10)
@given(st.sets(st.integers(0, SAMPLE.count("\n")), max_size=5))
def test_ids_stay_when_lines_are_inserted(places: set[int]) -> None:
    lines = SAMPLE.split("\n")
    moved = "\n".join(
        part for at, line in enumerate(lines) for part in ([""] if at in places else []) + [line]
    )
    moved = f"FIRST = 1\n\n\ndef before(records: int) -> int:\n    return records + 1\n{moved}"
    found = {each.id for each in _mutations.mutants("a.py", SAMPLE, facts_of(SAMPLE))}
    assert found <= {each.id for each in _mutations.mutants("a.py", moved, facts_of(moved))}


def test_ids_differ_between_files_functions_and_equal_lines() -> None:
    twice = SAMPLE + SAMPLE.replace("spend", "again") + "\n\nA = 1\nA = 1\n"
    facts = facts_of(twice)
    found = [
        each.id for name in ("a.py", "b.py") for each in _mutations.mutants(name, twice, facts)
    ]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "source",
    [
        '"""Three 3."""\n',
        'def f(x: "int | 3") -> "int | 3":\n    """Three 3."""\n    return x\n',
        'def f(x):\n    raise ValueError(f"{x + 3} of", 3 * x)\n',
        'def f(x):\n    LOG.warning("%d of", x + 3)\n    return x\n',
        "__all__ = [3, 4]\n",
        "def f(x):\n    return x\n    x.send(3)\n",
        "def f(x=3):\n    return x\n\n\nf(x)\nf(x=x)\n".replace("f(x)\nf(x=x)", "y = f(a), f(x=b)"),
        "def f(x):\n    assert x > 3\n    return x\n",
        "@lru_cache(maxsize=3)\n@dataclass(frozen=True)\ndef f(x):\n    return x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = 3\n",
        "def f(x):\n    return list(zip(x, x, strict=True))\n",
        "def f(x):\n    if False:\n        x.send(3)\n    return x\n",
        "X = frozenset({A, B})\n",
        "X = Field(max_length=200)\n",
        "# Number of rows in memory\n# at a time.\nROWS = 2**13\n",
        "y = make_axes(figure, left=3, right=4)\n",
        "y = f(x, lw=3, **{'fontsize': 8})\n",
        "def f(axes):\n    _plain(axes)\n    axes.grid(lw=3)\n    return axes\n",
        "X = f(1e-30)\n",
        "def f(x: Tensor, y: Tensor):\n    return len(x)\n",
    ],
)
def test_what_changes_nothing_is_left_out(source: str) -> None:
    assert drawn(source) == []


def test_the_same_bytecode_is_left_out_and_a_live_default_is_not() -> None:
    assert kinds("def f(x=3):\n    return x\n\n\ny = f()\n") == {"default"}
    same = "def f(x):\n    if x:\n        pass\n    for _ in ():\n        break\n"
    assert all(not _mutations.same_code(same, each.number, facts_of(same)) for each in drawn(same))


@pytest.mark.parametrize("size", ["({}).square()", "({}) ** 2", "abs({})", "({}).abs().sum()"])
def test_a_difference_the_other_way_round_is_a_fault_unless_its_sign_is_lost(size: str) -> None:
    def of(value: str) -> set[str]:
        return kinds(f"def f(x, y):\n    return {value}\n")

    assert "arguments swapped" not in of(size.format("x - y"))
    assert "arguments swapped" in of(size.format("x / y"))
    assert "arguments swapped" in of("x - y")


def test_an_exception_is_narrowed_only_where_no_other_name_catches_it() -> None:
    source = "try:\n    f()\nexcept (KeyError, LookupError, OSError):\n    g()\n"
    narrowed = {each.what for each in drawn(source) if each.operator == "exception narrowed"}
    assert narrowed == {"without LookupError", "without OSError"}


@pytest.mark.parametrize(("limit", "fault"), [("y * EPSILON_TOLERANCE", False), ("y * 2", True)])
def test_a_limit_with_a_tolerance_is_met_exactly_by_nobody(limit: str, fault: bool) -> None:
    assert ("boundary" in kinds(f"def f(x, y):\n    return x > {limit}\n")) == fault


def test_settings_of_a_panel_have_no_order_and_other_calls_have() -> None:
    def of(first: str, second: str) -> set[str]:
        return kinds(f"def f(axes):\n    {first}\n    {second}\n    return axes\n")

    assert "order" not in of("axes.set_xlim(x)", "axes.set_ylim(y)")
    assert "call removed" in of("axes.set_xlim(x)", "axes.set_ylim(y)")
    assert "order" in of("axes.set_xlim(x)", "send(y)")


def test_other_lengths_and_limits_are_faults() -> None:
    for source in (
        "def f(x: str, y: str):\n    return len(x)\n",
        "def f(x: Tensor, y: Tensor):\n    return sum(x)\n",
        "X = Field(ge=200)\n",
        "# Rows at a time.\n\nMOST = 200\n",
        "X = f(y, shown=3, **{'level': 8})\n",
        "X = f(1e-12)\n",
        "def f(axes):\n    axes.plot(x)\n    return axes\n",
    ):
        assert drawn(source)


def test_a_reviewed_equivalent_is_not_drawn() -> None:
    sources, facts = {"one": {"some.py": SAMPLE}}, facts_of(SAMPLE)
    first = _mutations.draw(sources, facts, 5, 0)
    again = _mutations.draw(sources, facts, 5, 0, [first[0].id])
    assert first[0].id not in {each.id for each in again}
    assert {each.id for each in first[1:]} < {each.id for each in again}, "one more, no other"


@settings(max_examples=3)
@given(st.integers(4, 30), st.integers(0, 9))
def test_every_package_has_a_part_by_its_lines(count: int, seed: int) -> None:
    sources = {f"p{n}": {f"p{n}/a.py": SAMPLE * (n + 1)} for n in range(4)}
    drawn = _mutations.draw(sources, facts_of(SAMPLE), count, seed)
    parts = [sum(each.file.startswith(f"p{n}/") for each in drawn) for n in range(4)]
    assert sum(parts) == count
    assert all(abs(part - count * (n + 1) / 10) <= 1 for n, part in enumerate(parts))


def test_marks_know_the_lines_that_run() -> None:
    source = "def f(x):\n    if x:\n        y = (1 +\n             x)\n    else:\n        y = 2\n    return y\n"
    marks = _executed.Marks()
    space: dict[str, object] = {}
    exec(compile(marks.tree(source, "a.py"), "a.py", "exec"), space)
    assert marks.lines() == {}
    assert space["f"](1) == 2  # type: ignore[operator]
    assert marks.lines() == {"a.py": [2, 3, 4, 7]}
    marks.clear()
    assert space["f"](0) == 2  # type: ignore[operator]
    assert marks.lines() == {"a.py": [2, 6, 7]}


def test_marks_and_faults_get_into_the_modules_that_tests_import() -> None:
    for package in PACKAGES:
        for file in TREE.sources(package):
            name = _executed.module_of(ROOT, file)
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert Path(str(spec.origin)).resolve() == ROOT / file
            assert name.startswith("fedsurrogate.")
    file = "common/secure_aggregation/rules.py"
    text = (ROOT / file).read_text()
    fault = next(
        each
        for each in _mutations.mutants(file, text, facts_of(text))
        if (each.function, each.operator) == ("dimensions_of", "constant")
    )
    of_run = importlib.import_module("fedsurrogate.common.secure_aggregation.rules")
    before = of_run.dimensions_of.__code__
    try:
        _planting.plant_in_function(ROOT, fault, facts_of(text))
        assert of_run.dimensions_of.__code__ != before
    finally:
        of_run.dimensions_of.__code__ = before


def test_what_can_be_drawn_is_listed_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    sources, facts = {"one": {"a.py": SAMPLE, "b.py": "A = 3\n"}}, facts_of(SAMPLE)
    found = _mutations.every(sources, facts)
    assert show(found, ["a.py"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    drawn = _mutations.draw({"one": {"a.py": SAMPLE}}, facts, 1000, 0)
    assert sorted(listed) == sorted(each.id for each in drawn)


# Two functions with the same faults; the tests look at the result of one only.
TOY = """
LIMIT = 3


def watched(x):
    return x < 7


def executed(x):
    return x < 7


def never(x):
    return x < 7
"""
TOY_TESTS = """
from toy import one


def test_watched():
    assert [one.watched(x) for x in (5, 6, 7, 8)] == [True, True, False, False]
    assert one.LIMIT == 3


def test_executed():
    one.executed(6)
"""


# Two packages; a test fails until it is mended.
FOLDERS = {
    "one/__init__.py": "",
    "one/a.py": "def f(x):\n    return x + 1\n",
    "two/__init__.py": "",
    "two/b.py": "def g(x):\n    return x + 2\n",
    "tests/test_one.py": "from one import a\n\ndef test_a():\n    assert a.f(1) == 2\n",
    "tests/test_later.py": (
        "import os\nfrom two import b\n\n"
        "def test_b():\n    assert b.g(1) == 3 and os.path.exists('mended')\n"
    ),
}


@pytest.mark.slow
def test_a_recording_serves_other_packages_and_what_failed_is_recorded_again(
    tmp_path: Path,
) -> None:
    for name, text in FOLDERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def drawn_from(package: str) -> str:
        return in_folder(tmp_path, "--packages", package, "--count", "9")[1]

    before = drawn_from("two")
    assert "tests/test_later.py: a test failed" in before
    assert "0 of 4 mutants were killed" in before
    assert "4 of 4 mutants were killed" in drawn_from("one")
    (tmp_path / "mended").touch()
    assert "4 of 4 mutants were killed" in drawn_from("two")


def test_the_score_of_a_toy_package(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "tests" / "toy").mkdir(parents=True)
    (tmp_path / "toy" / "__init__.py").write_text("")
    (tmp_path / "toy" / "one.py").write_text(TOY)
    (tmp_path / "tests" / "toy" / "test_one.py").write_text(TOY_TESTS)
    code, printed, results = in_folder(tmp_path, "--count", "50")
    assert code == 1
    result = results["0"]
    # Of each function: boundary, negation, 8 and 6. Of the constant: 4 and 2.
    assert result["packages"] == {"toy": {"killed": 6, "survived": 8}}
    functions = {each["function"] for each in result["survivors"]}
    assert functions == {"executed", "never"}
    assert "6 of 14 mutants were killed (42.9 %)" in printed
    assert (tmp_path / "toy" / "one.py").read_text() == TOY, "no fault touches a file"


@settings(max_examples=20)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 200))
def test_what_was_tried_is_known_after_a_run_was_stopped(
    tmp_path_factory: pytest.TempPathFactory, before: int, more: int, cut: int
) -> None:
    drawn = _mutations.mutants("some.py", SAMPLE, facts_of(SAMPLE))[:12]
    tried = [Tried(each, "killed", f"tests/{at}", at / 10) for at, each in enumerate(drawn)]
    file = tmp_path_factory.mktemp("run") / "tried"
    first = Journal(file, resume=False)
    assert first.known(drawn) == []
    for each in tried[:before]:
        first.add(each)
    if before:
        line = file.read_text().splitlines()[0]
        file.write_text(file.read_text() + line[:cut])
        if cut >= len(line):
            file.write_text(file.read_text() + "\n")
    again = Journal(file, resume=True)
    assert again.known(drawn) == tried[:before]
    assert again.known(drawn[more:]) == tried[more:before]
    assert Journal(file, resume=False).known(drawn) == []


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), min_size=1, max_size=25
    )
)
def test_near_tests_come_first_and_no_test_is_lost(
    drawn: list[tuple[int, int, bool]],
) -> None:
    """The number of a file is how near it is; from three on, not at all."""
    lines: dict[str, list[_executed.Test]] = {}
    executed = []
    for at, (place, seconds, runs_it) in enumerate(drawn):
        test = (f"{place}::{at}", float(seconds), {"a.py": [1]} if runs_it else {})
        lines.setdefault(str(place), []).append(test)
        executed += [test] * runs_it
    mutant = _mutations.mutants("a.py", SAMPLE, facts_of(SAMPLE))[0]

    def near(place: str, file: str) -> int:
        return min(int(place), FAR)

    found = in_order(mutant, executed, lines, near)  # type: ignore[arg-type]
    places = {name.partition("::")[0] for name, *_ in executed}
    assert sorted(found) == sorted(test for place in places for test in lines[place])
    first, last = found[: len(executed)], found[len(executed) :]
    assert sorted(first) == sorted(executed)
    assert [each[1] for each in last] == sorted(each[1] for each in last)
    close = [each for each in first if int(each[0][0]) < FAR]
    assert first[: len(close)] == close
    assert [(int(each[0][0]), each[1]) for each in close] == sorted(
        (int(each[0][0]), each[1]) for each in close
    )


def test_a_fault_outside_functions_is_tried_by_tests_whose_lines_are_known_too() -> None:
    """A test whose file was recorded before a change counts as executing all lines."""
    fault = _mutations.mutants("a.py", SAMPLE, facts_of(SAMPLE))[0]
    known: _executed.Test = ("tests/b.py::test_known", 0.1, {"a.py": [fault.lineno + 1000]})
    before: _executed.Test = ("tests/c.py::test_before", 0.1, {"a.py": [fault.lineno]})
    lines = {"tests/b.py": [known], "tests/c.py": [before]}
    assert harness.executing(fault, lines, inside=False) == [known, before]
    assert harness.executing(fault, lines) == [before]


def test_a_limit_is_no_test_unless_the_tests_keep_it_without_the_fault() -> None:
    first, second, third = _mutations.mutants("a.py", SAMPLE, facts_of(SAMPLE))[:3]

    def attempt(mutant: _mutations.Mutant, _: Path) -> int:
        if mutant == first:
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
            while True:
                pass
        return 0

    tried = [
        Tried(each, status, "", 1.0)
        for each, status in ((first, "timeout"), (second, "timeout"), (third, "survived"))
    ]
    found = trusted(tried, attempt, 1)
    assert [each.status for each in found] == ["survived", "timeout", "survived"]
