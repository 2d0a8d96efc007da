"""Whatever a user hands to a public function, the answer is a result or one error of the product
that names the argument.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_iris
from torch import nn

import fedsurrogate as fs
from fedsurrogate.common.methods import METHODS

X, Y = load_iris(return_X_y=True)
SITES = [(X[number::3], Y[number::3]) for number in range(3)]
ONE, OTHER = fs.fit(X, Y, site="a"), fs.fit(X, Y, site="b", method="average")
MODEL = fs.learn([ONE])
IMAGE = [np.zeros((8, 8))]
PRIVATE: dict[str, Any] = {"classes": range(3), "delta": 1e-5}


def function(batch: Any) -> Any:
    return batch


# Calls, and what the error says. Before arguments were checked, each of these answered with an
# exception of Python or of a library, with a sentence that is not true, or with no error at all.
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: fs.simulate(2.5), "sites = 2.5: must be a number of sites"),  # type: ignore[arg-type]
    (lambda: fs.simulate(True), "sites = True"),
    (lambda: fs.simulate(None), "sites = None"),  # type: ignore[arg-type]
    (lambda: fs.simulate((X, Y)), r"write \[\(x, y\)\] for one site"),
    (lambda: fs.simulate([(X, Y, 1)]), "a tuple of 3; give a pair"),
    (lambda: fs.simulate(SITES, backbone=3), "backbone = 3: must be a name"),  # type: ignore[arg-type]
    (lambda: fs.simulate(SITES, backbone=function), "wrap a function in a module"),  # type: ignore[arg-type]
    (lambda: fs.simulate(SITES, bags=3), "bags = 3: must be a list"),
    (
        lambda: fs.simulate(SITES, rank=object()),
        "rank = an object of type object: must be a text, a number",
    ),
    (lambda: fs.simulate(SITES, output_dir=3), "output_dir = 3: must be a path"),  # type: ignore[arg-type]
    (lambda: fs.simulate(SITES, classes=3), r"such as range\(3\)"),
    (lambda: fs.simulate(sitess=SITES), "did you mean 'sites'"),
    (lambda: fs.simulate(SITES, methd="average"), "did you mean 'method'"),
    (lambda: fs.simulate(SITES, sites=2), "multiple values for argument 'sites'"),  # type: ignore[misc]
    (lambda: fs.sweep(SITES, seeds=2.5), "seeds = 2.5: must be how many"),  # type: ignore[arg-type]
    (lambda: fs.sweep(SITES, seeds=0), "seed has no values"),
    (lambda: fs.sweep(SITES, grid=[1]), "must be lists by setting"),  # type: ignore[arg-type]
    (lambda: fs.sweep(SITES, grid={"epsilon": None}), "epsilon = None: must be a list"),  # type: ignore[dict-item]
    (lambda: fs.sweep(SITES, grid={3: [1]}), "must be lists by setting"),  # type: ignore[dict-item]
    (
        lambda: fs.sweep(SITES, epsilon=[1.0, 8.0], delta=1e-5),
        r"to try each write grid=\{'epsilon': \[...\]\}",
    ),
    (lambda: fs.sweep(2.5), "sites = 2.5"),  # type: ignore[arg-type]
    (lambda: fs.Sweep((), Path("x")).plot("/nowhere/x.png"), "make '/nowhere' first"),
    (lambda: fs.learn(ONE), r"write learn\(\[surrogate\]\)"),  # type: ignore[arg-type]
    (lambda: fs.learn([1, 2]), "number 0 of the list is 1"),  # type: ignore[list-item]
    (lambda: fs.learn("x"), "no list of surrogates"),  # type: ignore[arg-type]
    (lambda: fs.learn([]), "no surrogate to learn from"),
    (lambda: fs.learn([MODEL]), "an object of type Model"),  # type: ignore[list-item]
    (
        lambda: fs.learn([ONE, OTHER]),
        "site 'b' is of method 'average', that of site 'a' of 'fedpft'",
    ),
    (lambda: fs.learn([ONE], method="average"), "are of method 'fedpft'"),
    (lambda: fs.fit(X, Y, site=3), "site = 3: must be a text"),  # type: ignore[arg-type]
    (lambda: fs.fit(X, Y, site=None), "site = None: must be a text"),  # type: ignore[arg-type]
    (lambda: fs.fit(X, Y, method=["fedpft"]), "method = .*must be 'fedpft'"),  # type: ignore[arg-type]
    (lambda: fs.fit(X, Y, method="fedpt"), "did you mean 'fedpft'"),
    (lambda: fs.fit(X, lables=Y), "did you mean 'labels'"),  # type: ignore[call-arg]
    (lambda: fs.fit(X), "missing a required argument: 'labels'"),  # type: ignore[call-arg]
    (lambda: fs.fit(X, Y, classes=[]), "a list of one name or more"),
    (lambda: fs.fit(X, Y, classes="abc"), "among classes = abc"),
    (lambda: fs.epsilon("1", 1e-5), "noise_multiplier = '1': must be a positive"),  # type: ignore[arg-type]
    (lambda: fs.epsilon(None, 1e-5), "noise_multiplier = None"),  # type: ignore[arg-type]
    (lambda: fs.epsilon(0, 1e-5), "^noise_multiplier = 0: must be a positive number"),
    (lambda: fs.epsilon(1, 1e-5, steps=2.5), "steps = 2.5: must be a whole"),  # type: ignore[arg-type]
    (lambda: fs.epsilon(1, 1e-5, steps="3"), "steps = '3'"),  # type: ignore[arg-type]
    (lambda: fs.noise_multiplier("1", 1e-5), "epsilon = '1'"),  # type: ignore[arg-type]
    (lambda: fs.noise_multiplier(1, 1e-5, steps=2.5), "steps = 2.5"),  # type: ignore[arg-type]
    (lambda: fs.register_backbone("mine", function), "must be a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: fs.register_backbone("mine", nn.Flatten), "give an instance"),  # type: ignore[arg-type]
    (lambda: fs.register_backbone(3, nn.Flatten()), "backbone 3 is"),  # type: ignore[arg-type]
    (lambda: fs.register_backbone("mine", nn.Flatten(), 3), "transform = 3"),  # type: ignore[arg-type]
    (lambda: fs.features(IMAGE, function), "wrap a function"),  # type: ignore[arg-type]
    (lambda: fs.features(IMAGE, batch_size=0), "batch_size = 0"),
    (lambda: fs.features(IMAGE, image_size=-1), "image_size = -1"),
    (lambda: fs.features(IMAGE, image_size="a"), "image_size = 'a'"),  # type: ignore[arg-type]
    (lambda: fs.features(IMAGE, device="gpu"), "'cuda' or 'cuda:0'"),
    (lambda: fs.features(IMAGE, imagesize=3), "did you mean 'image_size'"),  # type: ignore[call-arg]
    (lambda: fs.simulate([(X, Y)], rounds=5), "unknown key 'rounds'"),
    (lambda: fs.simulate([(X, Y)], target="survival"), "no argument 'target'; it is now 'task'"),
    (lambda: fs.fit(X, Y, secure_sum=True), "it is now 'secure_aggregation'"),
    (lambda: fs.load(3), "path = 3: must be a path"),  # type: ignore[call-overload]
    (lambda: fs.load(""), "path is empty"),
    (lambda: fs.load("x.pb", int), "must be Model, ImageModel or Surrogate"),  # type: ignore[type-var]
    (lambda: fs.Model(3), "a model of 3"),  # type: ignore[arg-type]
    (lambda: fs.ImageModel(3), "a model of 3"),  # type: ignore[arg-type]
    (lambda: MODEL.save("/nowhere/m.safetensors"), "make '/nowhere' first"),
    (lambda: MODEL.save("/"), "must end in .safetensors"),
    (lambda: MODEL.save("m.pt"), "must end in .safetensors"),
    (lambda: MODEL.save(3), "path = 3"),  # type: ignore[arg-type]
    (lambda: ONE.save("/nowhere/m.pb"), "make '/nowhere' first"),
    (lambda: ONE.save(3), "path = 3"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_argument_is_named(
    call: Callable[[], object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fs.FedSurrogateError) as found:
        call()
    assert re.search(why, str(found.value))
    assert "\n" not in str(found.value)
    assert not list(tmp_path.iterdir()), "nothing has begun"


def test_a_file_of_another_kind_or_method_is_refused_by_name(tmp_path: Path) -> None:
    surrogate, model = ONE.save(tmp_path / "a.pb"), MODEL.save(tmp_path / "a.safetensors")
    assert fs.load(surrogate, fs.Surrogate).site == "a"
    assert fs.load(model, fs.Model).score(X, Y) > 0.9
    with pytest.raises(fs.SurrogateError, match="has a Model, and no Surrogate"):
        fs.load(model, fs.Surrogate)
    with pytest.raises(fs.SurrogateError, match="load it with the method"):
        fs.load(surrogate, method="average")
    with pytest.raises(fs.ConfigError, match="takes no setting 'epsilon'"):
        fs.load(model, epsilon=1.0)


def test_what_a_user_means_is_taken(tmp_path: Path) -> None:
    """Numbers of numpy, paths, None for not given, a generator, and a number of seeds."""
    numbers: dict[str, Any] = {"epsilon": np.float32(2), "seed": np.int64(3), "delta": 1e-5}
    sent = fs.fit(X, Y, classes="0,1,2", covariance=None, **numbers)
    assert sent.config.settings.epsilon == 2
    assert sent.config.settings.seed == 3
    data_dir: dict[str, Any] = {"data_dir": tmp_path}
    assert fs.fit(X, Y, **data_dir).config.settings.data_dir == str(tmp_path)
    assert fs.learn(each for each in [ONE]).score(X, Y) > 0.9  # type: ignore[arg-type]
    table = fs.sweep(SITES, seeds=2, method="average", output_dir=tmp_path, progress=False)
    assert [row["seed"] for row in table.rows] == [0, 1]


def test_sites_without_a_name_are_told_apart() -> None:
    parts = [fs.fit(x, y) for x, y in SITES]
    named = [fs.fit(x, y, site=f"site-{number}") for number, (x, y) in enumerate(SITES, 1)]
    model = fs.learn(parts)
    assert np.allclose(model.predict_proba(X), fs.learn(named).predict_proba(X), atol=1e-4)
    fs.learn([*parts[:2], named[0]])
    with pytest.raises(fs.SurrogateError, match="a second surrogate of site 'site'"):
        fs.learn([parts[0], parts[0]])
    private = [fs.fit(x, y, epsilon=8.0, **PRIVATE) for x, y in SITES]
    assert fs.learn(private).classes_.tolist() == [0, 1, 2]


def test_errors_version_and_methods_are_public() -> None:
    assert issubclass(fs.ConfigError, fs.FedSurrogateError)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", fs.__version__)
    table = fs.methods()
    assert [row["method"] for row in table] == list(METHODS)
    assert len(str(table).splitlines()) == len(table) + 1
    frame = table.to_frame()
    assert frame.loc["fedpft", "sends"] == "once"
    assert frame.loc["fedavg", "sends"] == "in rounds"
    assert bool(frame.loc["dp-fedavg", "privacy"])
    assert not frame.loc["average", "privacy"]
    assert pickle.loads(pickle.dumps(fs.fit)) is fs.fit


FUNCTIONS = [
    each for name in fs.__all__ if inspect.isfunction(each := getattr(fs, name)) and name != "sweep"
]
ODD: list[Any] = [
    *(None, True, -1, 0, 2.5, float("nan"), float("inf"), 10**30, "", "x", "a\nb", "é" * 300, b"x"),
    *([], [1, 2], ["a", None], (), {}, {"a": 1}, {1, 2}, object(), int, function, range(3)),
    *(np.float32(2), np.array(3.0), np.zeros((0, 4)), np.full((3, 4), np.nan), X[0], X[:, 0]),
    *(torch.zeros(2, 3, 4), nn.Identity(), nn.Flatten(), Path("nowhere"), ONE, MODEL, [ONE, ONE]),
    *(X[:20], Y[:20], [(X, Y)], [(X[:20], Y[:5])], (X, Y), IMAGE, [(X, Y, 2)], 1 + 2j),
]
GOOD: dict[str, list[Any]] = {
    "features": [X],
    "labels": [Y],
    "images": [IMAGE],
    "data": [[(IMAGE[0], 1)]],
    "sites": [SITES, [(X[:30], Y[:30])]],
    "surrogates": [[ONE]],
    "path": ["nowhere.pb"],
    "classes": [range(3)],
    "epsilon": [8.0],
    "delta": [1e-5],
    "noise_multiplier": [2.0],
    "name": ["mine"],
    "module": [nn.Flatten()],
}
MORE = (
    "epsilon", "delta", "rank", "seed", "classes", "task", "bags", "features__power_transform",
    "odd",
)  # fmt: skip


@st.composite
def calls(draw: st.DrawFn) -> tuple[Callable[..., object], dict[str, Any]]:
    """A public function, and arguments of which at least one is odd."""
    called = draw(st.sampled_from(FUNCTIONS))
    named: dict[str, Any] = {}
    parameters = inspect.signature(called).parameters.values()
    for each in parameters:
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            extra = draw(st.dictionaries(st.sampled_from(MORE), st.sampled_from(ODD), max_size=2))
            named |= {key: value for key, value in extra.items() if key not in named}
        elif each.name in GOOD and draw(st.integers(0, 4)):
            named[each.name] = draw(st.sampled_from(GOOD[each.name]))
        elif each.default is inspect.Parameter.empty or not draw(st.integers(0, 4)):
            named[each.name] = draw(st.sampled_from(ODD))
    return called, named


@settings(max_examples=100, deadline=None)
@given(call=calls())
def test_any_call_of_a_public_function_gives_a_result_or_an_error_of_the_product(
    call: tuple[Callable[..., object], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    called, named = call
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.getbasetemp())
        answer: object = None
        try:
            called(**named)
        except Exception as error:
            answer = error
    assert answer is None or isinstance(answer, fs.FedSurrogateError), repr(answer)
