"""The project's coding rules, checked in the source itself."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.code_lines import lines_of
from tests.children import imported_by
from tests.imports import (
    OWN,
    arrows,
    called,
    circles,
    holds_for,
    import_statements,
    modules,
    names_imported,
    nodes,
    parsed,
    within,
)

ROOT = Path(__file__).parents[1]
ROOMS = ("common", "client_app", "strategies", "server_app", "fedsurrogate")
MAY_IMPORT = {
    "common": {"common"},
    "client_app": {"common", "client_app"},
    "strategies": {"common", "strategies"},
    "server_app": {"common", "strategies", "server_app"},
    # The public interface: nothing imports it.
    "fedsurrogate": {"common", "client_app", "strategies", "server_app", "fedsurrogate"},
}
MAY_NAME_FLOWER = {
    "client_app/clientapp.py",
    "client_app/processes/app_process.py",
    "server_app/serverapp.py",
    "server_app/deployment/local_engine.py",
    "server_app/exchange.py",
    "common/wire/records.py",
}
# The only folder that may import anything else of Flower, and the modules that Flower documents.
FLOWER_ROOM = "common/flower/"
PUBLIC_FLOWER = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")
# Plays many SuperNodes, over the connection of Flower's own.
PLAYS_SUPERNODES = "benchmarks/many_senders.py"
# Measures Flower's own secure aggregation, which have no documented functions.
MEASURES_FLOWER = "benchmarks/peers_secure_aggregation.py"
UNPICKLERS = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "jsonpickle",
}  # fmt: skip
GENERATED = {"common/surrogate_pb2.py"}
MOST_LINES, MOST_PARAMETERS = 500, 7
HEAVY = (
    "torchvision", "open_clip", "timm", "matplotlib", "sklearn", "datasets", "pyarrow", "pydicom",
)  # fmt: skip


def sources(*folders: str) -> list[str]:
    """Python files below the folders, as paths from the root."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    )


def tree(path: str) -> ast.Module:
    return parsed(ROOT / path)


def imported(path: str) -> Iterator[str]:
    """Dotted names of all modules that a file imports, at any place."""
    for node in import_statements(ROOT / path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield node.module or ""


def packages(path: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def rooms(path: str) -> set[str]:
    """The rooms that a file imports. What is not in another room is the public interface's."""
    names = {
        name.removeprefix(f"{OWN}.").partition(".")[0]
        for name in imported(path)
        if within(name, (OWN,))
    }
    return {name if name in ROOMS else OWN for name in names}


def keyword(call: ast.Call, name: str) -> object:
    """Constant value of a keyword argument; None if it is missing or not constant."""
    return next(
        (
            k.value.value
            for k in call.keywords
            if k.arg == name and isinstance(k.value, ast.Constant)
        ),
        None,
    )


@holds_for(sources(*ROOMS))
def test_rooms_import_only_what_they_may(path: str) -> None:
    room = path.partition("/")[0]
    assert rooms(path) <= MAY_IMPORT[room]


BARE = "|".join(sorted(set(ROOMS) - {OWN}))
NAMED_BARE = re.compile(rf"^\s*(from\s+|import\s[^\n]*\b)({BARE})\b", re.MULTILINE)


# Flower imports the two files of the apps by a name of their own, from which dots would lead elsewhere.
@holds_for(
    [each for each in sources(*ROOMS) if not each.startswith(OWN) and "_app/app.py" not in each]
)
def test_a_module_names_its_own_room_by_dots_alone(path: str) -> None:
    room, text = f"{OWN}.{path.partition('/')[0]}.", (ROOT / path).read_text()
    # Most files do not even name it, and parsing all takes seconds.
    for node in ast.walk(ast.parse(text if room in text else "")):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith(room), f"{path} line {node.lineno}"


@holds_for(["client_app/app.py", "server_app/app.py"])
def test_the_files_that_flower_imports_use_full_names(path: str) -> None:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        assert not isinstance(node, ast.ImportFrom) or not node.level


@holds_for(sources(*ROOMS, "benchmarks", "examples", "tests", "docs"))
def test_rooms_are_imported_by_one_name_only(path: str) -> None:
    """`common` and `fedsurrogate.common` would be two modules, and the first another package's."""
    # Most files name none of them, and parsing all takes seconds.
    named = NAMED_BARE.search((ROOT / path).read_text().replace(f"{OWN}.", OWN))
    assert not named or not packages(path) & (set(ROOMS) - {OWN}), f"write {OWN}.common and so on"


@holds_for(sources(*ROOMS))
def test_flower_is_named_only_where_it_carries(path: str) -> None:
    assert (
        "flwr" not in packages(path)
        or path in MAY_NAME_FLOWER
        or path.startswith(("strategies/", FLOWER_ROOM))
    )


def private_flower(path: Path) -> list[str]:
    """What a file imports from Flower outside its documented modules, or without being exported by
    them.
    """
    dynamic = (
        argument.value
        for node in nodes(path)
        if isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__"))
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant)
    )
    wrong = [name for name in map(str, dynamic) if within(name, ("flwr",))]
    wrong = [name for name in wrong if name not in PUBLIC_FLOWER]
    for name in names_imported(path):
        module, _, attribute = name.rpartition(".")
        public = module in PUBLIC_FLOWER and attribute in import_module(module).__all__
        if within(name, ("flwr",)) and not public:
            wrong.append(name)
    return wrong


@holds_for(
    path
    for path in sources(*ROOMS, "benchmarks", "deploy", "examples")
    if not path.startswith(FLOWER_ROOM) and path not in (PLAYS_SUPERNODES, MEASURES_FLOWER)
)
def test_private_modules_of_flower_are_imported_in_their_room_only(path: str) -> None:
    assert not private_flower(ROOT / path), "ask for it in common/flower/interface.py"


@pytest.mark.parametrize(
    "path",
    [
        PLAYS_SUPERNODES,
        MEASURES_FLOWER,
        "common/flower/v134.py",
    ],
)
def test_what_may_import_private_modules_of_flower_does(path: str) -> None:
    """Otherwise the exception is not needed, or the rule does not see."""
    assert private_flower(ROOT / path)


@holds_for(sources(*ROOMS, "benchmarks", "deploy"))
def test_nothing_is_ever_unpickled(path: str) -> None:
    assert not packages(path) & UNPICKLERS
    for node in nodes(ROOT / path):
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        loads = name == "load" and ast.unparse(node.func) == "torch.load"
        assert not loads or keyword(node, "weights_only") is True, f"line {node.lineno}"
        assert not name.endswith("read_pickle"), f"line {node.lineno}"
        assert keyword(node, "allow_pickle") in (None, False), f"line {node.lineno}"


@holds_for(sources(*ROOMS, "benchmarks", "deploy"))
def test_a_file_has_at_most_500_lines_of_code(path: str) -> None:
    text = (ROOT / path).read_text()
    few = path in GENERATED or text.count("\n") <= MOST_LINES
    assert few or lines_of(text)["code"] <= MOST_LINES


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All parameters of a function except `self` and `cls`."""
    found = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each for each in found if each.arg not in ("self", "cls")]


def is_command(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Typer makes a command from the function: its parameters are then options that users
    type.
    """
    return "/cli/" in path and any(
        each.annotation and "typer." in ast.unparse(each.annotation)
        for each in parameters(function)
    )


@holds_for(sources(*ROOMS))
def test_a_function_has_at_most_seven_parameters(path: str) -> None:
    for node in nodes(ROOT / path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_command(path, node):
            names = [each.arg for each in parameters(node)]
            assert len(names) <= MOST_PARAMETERS, (
                f"{path} line {node.lineno}: {node.name} has {len(names)} parameters; group those "
                "that name one thing in a frozen dataclass"
            )


FOLDERS = sorted({path.rpartition("/")[0] for path in sources(*ROOMS)})
# Folders of one method only. Code for two methods is above them, or in a folder without a method.
OF_METHODS = {
    f"{side}/{method}"
    for side in ("client_app/methods", "strategies")
    for method in ("fedpft", "fedavg", "fedlap", "dpcvae", "heads")
}


@holds_for(sorted(OF_METHODS))
def test_methods_do_not_import_each_other(folder: str) -> None:
    others = {f"{OWN}.{other.replace('/', '.')}" for other in OF_METHODS - {folder}}
    for path in sources(folder):
        for name in imported(path):
            assert not any(name == other or name.startswith(f"{other}.") for other in others), (
                f"{path} imports {name}"
            )


@holds_for(sources("client_app/cli", "server_app/cli"))
def test_command_lines_import_public_names_only(path: str) -> None:
    for node in import_statements(ROOT / path):
        if isinstance(node, ast.ImportFrom) and within(node.module or "", (OWN,)):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{path} line {node.lineno}: {private[0]} is private"


@pytest.mark.parametrize(
    "folder", sorted({folder.partition("/")[0] + "/cli" for folder in FOLDERS if "/cli" in folder})
)
def test_nothing_but_an_entry_point_imports_command_lines(folder: str) -> None:
    name = f"{OWN}.{folder.replace('/', '.')}"
    users = [
        path
        for path in sources(*ROOMS)
        if not path.startswith(folder) and any(within(n, (name,)) for n in imported(path))
    ]
    assert not users


@holds_for(sources(*ROOMS))
def test_a_file_and_a_folder_say_what_they_are_for(path: str) -> None:
    assert (ROOT / path).with_name("__init__.py").exists()
    assert path in GENERATED or ast.get_docstring(tree(path))


# Parts of a docstring that name parameters and fields, and each name.
NAMING = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", re.MULTILINE)
NAMED = re.compile(r"^    \*{0,2}(\w+):", re.MULTILINE)
# Estimators have those of their base class.
INHERIT = "fedsurrogate/_estimators.py"


def unknown_names(source: ast.Module) -> list[str]:
    """Names in docstrings that are no parameter of the function, and no field of the class."""
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        elif isinstance(node, ast.ClassDef):
            inner = list(ast.walk(node))
            names = {each.arg for each in inner if isinstance(each, ast.arg)}
            names |= {each.attr for each in inner if isinstance(each, ast.Attribute)}
            stored = [each for each in inner if isinstance(each, ast.Name)]
            names |= {each.id for each in stored if isinstance(each.ctx, ast.Store)}
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        else:
            continue
        parts = NAMING.findall(ast.get_docstring(node) or "")
        named = [name for part in parts for name in NAMED.findall(part)]
        found += [f"{node.name}: {name}" for name in named if name not in names]
    return found


@holds_for(path for path in sources(*ROOMS) if path != INHERIT)
def test_docstrings_name_parameters_and_fields_that_are_there(path: str) -> None:
    assert not unknown_names(tree(path))


def test_the_rules_see_what_they_look_for() -> None:
    """A rule that never finds anything is not tested."""
    assert len(sources(*ROOMS)) > 30
    assert "flwr" in packages("client_app/clientapp.py")
    assert rooms("client_app/clientapp.py") == {"common", "client_app"}
    assert "open_clip" in packages("common/backbones/libraries.py")


# What a newcomer expects: files that begin so, and what they do not import. A rule that has become
# true fails as an unexpected success: then its mark goes. Rules name the folders of today and those
# that are planned.
REGISTRY = ("fedsurrogate.common.methods",)
ACCOUNTING = (
    "fedsurrogate.common.privacy.accounting",
    "fedsurrogate.common.privacy.gaussian_mechanism",
)
METHOD_SETTINGS = ("fedsurrogate.common.settings", "fedsurrogate.common.run")
OTHER_STRATEGIES = tuple(
    f"fedsurrogate.strategies.{name}"
    for name in (
        "closed_form", "dpcvae", "fedavg", "fedlap", "fedpft", "heads", "pooling", "robustness",
        "secure_aggregation",
    )
)  # fmt: skip


# By sentence: files, and what they do not import.
EXPECTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "settings know no method": (("fedsurrogate.common.settings",), REGISTRY),
    "a method names its noise, privacy computes it": (REGISTRY, ACCOUNTING),
    "noise knows no method": (("fedsurrogate.common.privacy",), (*REGISTRY, *METHOD_SETTINGS)),
    "the gate knows no method's types": (
        (
            "fedsurrogate.client_app.governance.gate",
            "fedsurrogate.client_app.governance.ledger",
            "fedsurrogate.client_app.governance.budget",
        ),
        ("fedsurrogate.client_app.methods",),
    ),
    "data know no policy": (
        ("fedsurrogate.client_app.datasets", "fedsurrogate.client_app.features"),
        ("fedsurrogate.client_app.governance",),
    ),
    "collecting knows no mathematics": (("fedsurrogate.strategies.base",), OTHER_STRATEGIES),
    "reading draws nothing": (
        (
            "fedsurrogate.server_app.runs",
            "fedsurrogate.server_app.lifecycle.before_start",
            "fedsurrogate.server_app.lifecycle.before_start",
        ),
        ("fedsurrogate.server_app.report",),
    ),
    "reading settles nothing": (
        ("fedsurrogate.server_app.runs",),
        ("fedsurrogate.server_app.lifecycle",),
    ),
}


@pytest.mark.parametrize("sentence", EXPECTED)
def test_what_a_newcomer_expects_is_true(sentence: str) -> None:
    files, without = EXPECTED[sentence]
    chosen = {module: path for module, path in modules().items() if within(module, files)}
    found = {
        module: [name for name in names_imported(path) if within(name, without)]
        for module, path in chosen.items()
    }
    assert not {module: names for module, names in found.items() if names}


def test_no_modules_import_each_other_in_a_circle_not_even_for_types_or_inside_functions() -> None:
    assert not circles(arrows())


def descriptor(code: str) -> bytes:
    """The schema that generated protobuf code holds."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AddSerializedFile"):
            argument = node.args[0]
            assert isinstance(argument, ast.Constant)
            assert isinstance(argument.value, bytes)
            return argument.value
    raise AssertionError("no schema in the generated code")


def test_generated_code_is_that_of_the_schema(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    arguments = [
        f"-I{ROOT / 'common'}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        "surrogate.proto",
    ]
    assert protoc.main(["protoc", *arguments]) == 0
    fresh, committed = (
        descriptor((at / "surrogate_pb2.py").read_text()) for at in (tmp_path, ROOT / "common")
    )
    assert fresh == committed, "run `make proto`"
    assert (tmp_path / "surrogate_pb2.pyi").read_text() == (
        ROOT / "common" / "surrogate_pb2.pyi"
    ).read_text()


@pytest.mark.parametrize(
    "module",
    [
        "fedsurrogate.client_app.clientapp",
        "fedsurrogate.client_app.requests",
        "fedsurrogate.server_app.serverapp",
    ],
)
def test_apps_start_without_heavy_libraries(module: str) -> None:
    assert imported_by(f"import {module}", HEAVY) == []


def test_commands_that_wait_for_others_load_no_heavy_library(tmp_path: Path) -> None:
    """`coordinator run` starts at once, and `site join` stays small for as long as a site takes part."""
    run = (
        "import fedsurrogate.server_app.deployment.submit; "
        "import fedsurrogate.server_app.lifecycle.before_start"
    )
    assert imported_by(run, ("flwr", "grpc", "torch", *HEAVY)) == []
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").touch()
    join = (
        "from fedsurrogate.client_app.node_config import NodeConfig; "
        "from fedsurrogate.client_app.cli.join import check_settings; "
        "from fedsurrogate.client_app.processes.supervisor import looked_at; "
        "import fedsurrogate.client_app.processes.supervisor; "
        f"own = {{'state_dir': {str(tmp_path / 'state')!r}, 'cache_dir': {str(tmp_path / 'cache')!r}}}; "
        "check_settings(NodeConfig(data='digits', **own)); "
        f"looked_at(NodeConfig(data='imagefolder', data_dir={str(tmp_path)!r}, **own))"
    )
    assert imported_by(join, ("flwr", "grpc", "torch", *HEAVY)) == []


def test_flowers_room_opens_without_flower() -> None:
    """The process that starts and ends a site's others stays free of gRPC's threads."""
    opened = (
        "import fedsurrogate.client_app.processes.supervisor; "
        "from fedsurrogate.common.flower import flower; flower().supernode_log"
    )
    assert imported_by(opened, ("flwr", "grpc", "ray", "torch", "numpy")) == []
    assert imported_by(
        "from fedsurrogate.common.flower import flower; flower().open_log()", ("flwr", "ray")
    ) == ["flwr"]
