"""The settings whose consequences are pinned, in a fixed order: every method, in private and secure
runs, key by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from fedsurrogate.common.settings.base import Scalar

Flat = dict[str, Scalar]
CLASSES = "a,b,c"
# All records in every step: accounting is then a closed form. The keys of sample rates below have
# others.
BUDGET: Flat = {"epsilon": 8.0, "delta": 1e-5, "classes": CLASSES, "fedavg.sample-rate": 1.0}
SUM: Flat = {"secure-aggregation": True, "classes": CLASSES}
SITUATIONS: dict[str, Flat] = {
    "": {},
    "private": BUDGET,
    "secure aggregation": SUM,
    "private secure aggregation": BUDGET | SUM,
}
SHA = "5e" * 32
# By key: values other than the default. Values that are out of range, or clash with others, give
# refusals.
VALUES: dict[str, tuple[Scalar, ...]] = {
    "seed": (7,),
    "noise-seed": (7,),
    "output-dir": ("elsewhere",),
    "resume": ("runs/before",),
    "approval": ("{}",),
    "compare": (True,),
    "device": ("cpu",),
    "data": ("imagefolder", "dicom", "parquet", "safetensors"),
    "data-dir": ("data",),
    "dataset": ("one,two",),
    "label-column": ("diagnosis",),
    "patient-column": ("patient",),
    "bag-column": ("study",),
    "classes": (CLASSES, "d,c,b,a"),
    "partition": ("iid", "classes", "column"),
    "alpha": (0.3,),
    "classes-per-site": (1,),
    "site-column": ("hospital",),
    "test-fraction": (0.3, 0.6),
    "backbone": (
        *(
            "pixels:rgb",
            "torchvision:mobilenet_v2",
            "torchvision:resnet50",
            "open_clip:ViT-B-32/openai",
        ),
        *("timm:vit_small_patch16_224", "own"),
    ),
    "weights-path": ("weights.safetensors",),
    "image-size": (28, 8),
    "fingerprint": ("f" * 16,),
    "sites": (5,),
    "quorum": (0.9,),
    "check-only": (True,),
    "deadline": (60.0,),
    "grace": (5.0,),
    "max-payload-mib": (64,),
    "max-share": (0.0, 2.0),
    "defence": ("none", "harm", "median", "trimmed", "screen"),
    "epsilon": (1.0, 0.25),
    "delta": (1e-6,),
    "secure-aggregation-records": (5000,),
    "secure-aggregation-range": (4.0,),
    "colluding": (0.5, 0.0),
    "dropouts": (0.0, 0.4),
    # Another target than classes needs settings of its own.
    "task": ("regression",),
    "target-range": ("0,1",),
    "value-columns": ("age",),
    "label-columns": ("edema",),
    "label-sets": ("north=edema",),
    "time-column": ("months",),
    "event-column": ("died",),
    "horizon": (3.0,),
    "bins": (5,),
    "time-unit": ("years",),
    "time-head": ("cells", "residuals"),
    "fedpft.covariance": ("full", "diag", "spherical", "gram", "lowrank"),
    "fedpft.components": (3,),
    "fedpft.rank": (4,),
    "fedpft.bits": (8,),
    "fedpft.samples-per-component": (2,),
    "fedpft.privacy": ("none", "sums", "theorem-4.1"),
    "fedpft.clip": (2.5,),
    "fedpft.public": ("public.safetensors",),
    "fedpft.topology": ("chain",),
    "fedpft.order": ("south,north",),
    "fedpft.seal": (True,),
    "head.epochs": (3,),
    "head.min-steps": (50,),
    "head.batch-size": (32,),
    "head.learning-rate": (0.01,),
    "head.max-samples": (1000,),
    "head.solver": ("lda", "ridge", "naive-bayes", "qda", "sampled", "logistic"),
    "head.shrinkage": (0.3,),
    "features.power-transform": (0.5, 1.0),
    "features.bag": ("mean",),
    "features.ranges": ("0,1",),
    "features.mean": ("0.5,0.5,0.5",),
    "features.std": ("0.2,0.2,0.2",),
    "features.pooling": ("cls",),
    "features.projection": ("projection.safetensors",),
    "features.dimensions": (4,),
    "features.records": (500,),
    "features.digest": (2 * SHA,),
    "fedavg.model": ("linear", "mlp", "convnet"),
    "fedavg.width": (16,),
    "fedavg.rounds": (3,),
    "fedavg.local-epochs": (2,),
    "fedavg.batch-size": (16,),
    "fedavg.learning-rate": (0.5,),
    "fedavg.momentum": (0.9,),
    "fedavg.mu": (0.1,),
    "fedavg.server-learning-rate": (0.1,),
    "fedavg.keep": (0.25,),
    "fedavg.clip": (0.5,),
    "fedavg.sample-rate": (0.5,),
    "fedavg.noise-multiplier": (5.0, 0.1),
    "fedavg.noise": ("site",),
    "fedlap.model": ("linear", "mlp", "convnet"),
    "fedlap.width": (16,),
    "fedlap.rounds": (3,),
    "fedlap.images-per-class": (2,),
    "fedlap.start": ("noise",),
    "fedlap.trajectories": (2,),
    "fedlap.loops": (2,),
    "fedlap.batches": (2,),
    "fedlap.batch-size": (16,),
    "fedlap.image-steps": (10,),
    "fedlap.model-steps": (3,),
    "fedlap.trust-radius": (2.0,),
    "fedlap.image-learning-rate": (10.0,),
    "fedlap.mse-weight": (0.5,),
    "fedlap.learning-rate": (0.5,),
    "fedlap.cosine": (True,),
    "fedlap.server-steps": (7,),
    "fedlap.rule": ("min", "fixed"),
    "fedlap.descent": ("annealed", "plain"),
    "fedlap.memory": (0.5,),
    "fedlap.augment": ("crop,cutout",),
    "fedlap.clip": (1.0,),
    "fedlap.sample-rate": (0.5,),
    "fedlap.noise-multiplier": (5.0,),
    "dpcvae.rounds": (4,),
    "dpcvae.first-round": ("counts",),
    "dpcvae.latent": (4,),
    "dpcvae.hidden": (16,),
    "dpcvae.learned-variance": (False,),
    "dpcvae.class-prior": (False,),
    "dpcvae.beta": (2.0,),
    "dpcvae.warm-up": (0.0,),
    "dpcvae.local-epochs": (2,),
    "dpcvae.batch-size": (16,),
    "dpcvae.optimiser": ("sgd",),
    "dpcvae.learning-rate": (0.01,),
    "dpcvae.cosine": (False,),
    "dpcvae.clip": (1.0,),
    "dpcvae.sample-rate": (0.5,),
    "dpcvae.noise-multiplier": (20.0, 0.1),
    "dpcvae.synthetic": (10,),
    "baseline.temperature": (2.0,),
    "baseline.validation": (0.4,),
    "counting.model": ("model.fedsurrogate",),
    "counting.digest": ("ab" * 32,),
    "counting.bins": (8,),
    "counting.largest-error": (0.5,),
    "counting.images": ("size,maker",),
    "counting.image-bins": ("size: 64, 128",),
}
# By key: a value that cannot be one of its values.
UNREADABLE: Flat = {
    **{
        "method": "fedxyz",
        "device": "tpu",
        "classes": ",",
        "backbone": "python:package.module:function",
        "max-share": 0.5,
    },
    **{
        "delta": 0.5,
        "fedpft.bits": 12,
        "fedpft.privacy": "dp-em",
        "fedpft.topology": "ring",
        "head.shrinkage": "none",
    },
    **{
        "features.power-transform": "half",
        "features.bag": "max",
        "fedlap.augment": "mirror",
        "dpcvae.rounds": 1,
        "counting.digest": "ab",
        "counting.bins": 2,
    },
    **{
        "data": "pictures",
        "partition": "halves",
        "defence": "walls",
        "fedpft.covariance": "round",
        "head.solver": "exact",
    },
    **{
        "fedavg.model": "deep",
        "fedavg.noise": "none",
        "fedlap.model": "deep",
        "fedlap.rule": "mean",
    },
    **{
        "fedlap.start": "first",
        "dpcvae.first-round": "means",
        "dpcvae.optimiser": "lion",
    },
    **{
        "counting.kind": "votes",
        "fedpft.clip": 1e-9,
        "fedavg.clip": 0.0,
        "dpcvae.clip": 1e9,
    },
}
EPSILON: Flat = {"epsilon": 1.0, "delta": 1e-5}
SUMMED: Flat = {"method": "fedavg", "secure-aggregation": True, "classes": "a,b"}
NUMBER: Flat = {"task": "regression", "target-range": "0,1"}
# Keys that subjects vary.
OF_SUBJECTS = ("method", "secure-aggregation", "counting.kind")
# Settings that no method supports, or that cannot be read: only the text of the refusal is pinned.
WRONG: tuple[Flat, ...] = (
    *({key: value} for key, value in UNREADABLE.items()),
    {"methd": "fedpft"},
    {"fedpft.covarience": "full", "rank": 3},
    {"completely-other": 1},
    {"fedpft": "lowrank"},
    {"seed": "7", "compare": 1, "alpha": True, "backbone": 3},
    {"seed": 2**31, "fedpft.rank": -1, "unknown": 1},
    {"alpha": 1},
    {"quorum": 1.5},
    {"backbone": ""},
    {"classes": "a,b,a"},
    {"method": "x" * 300},
    {"output-dir": ""},
    {"epsilon": 1.0},
    {"delta": 1e-5},
    {"epsilon": 1.0, "delta": 0.02},
    EPSILON | {"fedpft.privacy": "none"},
    {
        "epsilon": 0.5,
        "delta": 1e-5,
        "fedpft.privacy": "theorem-4.1",
        "fedpft.covariance": "diag",
        "defence": "screen",
    },
    {"epsilon": 50.0, "delta": 1e-5, "fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"},
    EPSILON | {"fedpft.components": 2, "defence": "harm"},
    EPSILON | {"data": "imagefolder"},
    EPSILON | {"data": "dicom", "backbone": "pixels:rgb"},
    {"method": "psg", "epsilon": 1.0, "delta": 1e-5, "fedlap.mse-weight": 0.1},
    {
        "method": "dp-fedavg",
        "epsilon": 1.0,
        "delta": 1e-5,
        "fedavg.sample-rate": 1.0,
        "fedavg.noise-multiplier": 0.2,
    },
    {"method": "dpcvae", "epsilon": 1.0, "delta": 1e-5, "dpcvae.noise-multiplier": 0.2},
    {"method": "fedavg", "fedavg.noise-multiplier": 1.0},
    {"method": "fedavg", "secure-aggregation": True},
    # Each names the methods that support the setting.
    {"method": "scaffold", "secure-aggregation": True},
    EPSILON | {"method": "scaffold"},
    {"method": "dpcvae", "features.ranges": "0,1"},
    {"method": "average", "fedpft.order": "south,north"},
    SUMMED | {"max-share": 2.0},
    SUMMED | {"resume": "runs/x"},
    SUMMED | {"secure-aggregation-records": 10**9},
    {"secure-aggregation": True, "fedpft.topology": "chain", "fedpft.seal": True},
    {"fedpft.seal": True},
    {"partition": "column"},
    {"task": "regression", "target-range": "1,0"},
    {"task": "multilabel", "label-columns": "edema", "label-sets": "north"},
    {"task": "multilabel"},
    {
        "task": "multilabel",
        "label-columns": "edema,mass",
        "label-sets": "north=edema,mass; south=edema",
        "secure-aggregation": True,
        "colluding": 0.0,
    },
    {"task": "survival"},
    {"task": "survival", "horizon": 3.0, "time-column": "months"},
    NUMBER | {"method": "fedrep"},
    NUMBER | {"classes": CLASSES},
    NUMBER | {"partition": "classes"},
    NUMBER | {"fedpft.covariance": "diag"},
    NUMBER | {"value-columns": "age,sex", "bins": 3},
    {"task": "regression", "target-range": "0,1;0,1;0,1", "value-columns": "age,sex"},
    *({"counting.kind": kind} for kind in ("evaluation", "survey")),
    {"counting.kind": "evaluation", "classes": CLASSES},
    {
        "counting.kind": "survey",
        "classes": CLASSES,
        "secure-aggregation": True,
        "method": "fedlap",
        "defence": "median",
    },
)
# The same as a person types them.
TYPED: tuple[str, ...] = (
    "task=regression target-range=0,1 fedpft.topology=chain",
    "task=regression target-range=0,1 method=fedavg epsilon=1.0 delta=1e-5",
    "task=regression target-range=0,1 method=fedavg features.ranges=0,1",
    "task=regression target-range=0,1 secure-aggregation=true features.ranges=0,1 features.projection=x",
    "task=regression target-range=0,1 features.ranges=1,0",
    "task=survival horizon=2.0 time-column=a event-column=a time-unit=y",
    "task=survival horizon=2.0 time-column=event",
    "task=survival horizon=2.0 event-column=time",
    "task=survival horizon=2.0 compare=true",
    "task=survival horizon=2.0 counting.kind=survey classes=a,b",
    "task=survival horizon=2.0 counting.kind=evaluation",
    "task=multilabel label-columns=a,b counting.kind=survey counting.bins=5",
    "task=multilabel label-columns=a,b method=fedavg fedavg.model=mlp",
    "task=multilabel label-columns=a,b method=fedlambda",
    "counting.kind=survey classes=a,b secure-aggregation=true features.projection=x",
    "secure-aggregation=true",
    "fedpft.bits=8 fedpft.covariance=diag",
    "head.learning-rate=nan",
    "alpha=inf",
    "deadline=nan",
    "fedpft.components=2.0",
    "fedpft.components=true",
    "features.power-transform=0.0",
    "features.power-transform=2.5",
    "features.power-transform=true",
    "output_dir=x",
    "zzzzzz=1",
)
COUNTING: Flat = {"classes": CLASSES, "counting.digest": SHA}
# Keys that a run which counts can depend on.
OF_COUNTS = (
    *(
        "seed",
        "classes",
        "epsilon",
        "delta",
        "defence",
        "resume",
        "max-share",
        "colluding",
        "dropouts",
        "sites",
    ),
    *(
        "secure-aggregation-records",
        "counting.digest",
        "counting.bins",
        "fedpft.topology",
        "features.power-transform",
    ),
)


def subjects(methods: tuple[str, ...], kinds: tuple[str, ...]) -> Iterator[tuple[str, Flat]]:
    """Names and settings of a run of every method in every situation; some are refused. kinds: of
    runs that count.
    """
    for method in methods:
        for name, more in SITUATIONS.items():
            # The sums of FedPFT that secure aggregation can add up.
            own: Flat = (
                {"fedpft.covariance": "gram"} if method == "fedpft" and "secure" in name else {}
            )
            yield f"{method}, {name}".rstrip(", "), {"method": method} | own | more
        if method == "fedpft":
            for name, more in SITUATIONS.items():
                yield (
                    f"fedpft chain, {name}".rstrip(", "),
                    {"method": method, "fedpft.topology": "chain"} | more,
                )
    for kind in kinds:
        for name, more in SITUATIONS.items():
            yield f"{kind}, {name}".rstrip(", "), COUNTING | {"counting.kind": kind} | more


def variations(subject: str, settings: Mapping[str, Scalar]) -> Iterator[Flat]:
    """Changes of a run by one setting; and of FedPFT, by all combinations of those that decide its
    mechanism.
    """
    counts = settings.get("counting.kind", "none") != "none"
    for key, values in VALUES.items():
        if not counts or key in OF_COUNTS:
            yield from ({key: value} for value in values if settings.get(key) != value)
    if subject in ("fedpft", "fedpft, private", "fedpft, secure aggregation"):
        yield from _combined(
            {
                "fedpft.covariance": ("full", "diag", "spherical", "lowrank", "gram"),
                "fedpft.components": (1, 3),
                "fedpft.privacy": ("auto", "theorem-4.1") if "private" in subject else ("auto",),
                "fedpft.topology": ("star", "chain"),
            }
        )
        yield from _combined({"fedpft.bits": (8,), "fedpft.rank": (4, 64)})
        yield from _combined(
            {"head.solver": ("lda", "ridge", "qda"), "fedpft.covariance": ("full", "diag", "gram")}
        )
    if subject == "fedpft, private":
        yield from _combined(
            {"fedpft.public": ("x",), "fedpft.clip": (0.0, 1.5), "fedpft.components": (1, 2)}
        )
    if subject.endswith("fedavg") or subject == "fedrep":
        models = {
            "fedavg.model": ("mlp", "convnet"),
            "backbone": ("pixels", "torchvision:resnet18"),
            "image-size": (0, 16),
        }
        yield from _combined(models)
    if subject in ("fedlap", "fedlap, private", "dsc"):
        yield from _combined({"backbone": ("pixels", "pixels:rgb", "own"), "image-size": (8, 16)})
    if subject in ("dpcvae", "dpcvae, private"):
        layers = {
            "dpcvae.hidden": (0, 16),
            "dpcvae.learned-variance": (True, False),
            "dpcvae.class-prior": (True, False),
        }
        yield from _combined(layers | {"dpcvae.first-round": ("sums", "counts")})
    if subject.startswith("dp-fedavg"):
        distributed = {
            "fedavg.noise": ("distributed", "site"),
            "epsilon": (0.5, 2.0),
            "fedavg.rounds": (0, 4),
            "fedavg.model": ("auto", "mlp"),
        }
        yield from _combined(distributed)


def _combined(axes: Mapping[str, tuple[Scalar, ...]]) -> Iterator[Flat]:
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def as_text(settings: Mapping[str, Scalar]) -> str:
    """Settings as one text, in the form of the command line but without quotes."""
    shown = (
        value
        if isinstance(value, str)
        else repr(value).lower()
        if value is True or value is False
        else repr(value)
        for value in settings.values()
    )
    return " ".join(f"{key}={value}" for key, value in zip(settings, shown, strict=True))
