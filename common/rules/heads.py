"""Rules of the methods whose sites train a head on their own records: schema and work at a site."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.limits import LARGEST_COUNT
from common.rules.spec import GRADIENTS, Field, Sizes, Work

if TYPE_CHECKING:
    from common.config.run_config import RunConfig

# By section of the settings: the keys that decide what a site sends, in the run's digest.
HEAD_KEYS = ("epochs", "min_steps", "batch_size", "learning_rate", "max_samples")
BASELINE_KEYS = ("temperature", "received", "samples", "teachers", "synthetic", "neighbours", "validation")
HEAD = (Field("weight", "C d"), Field("bias", "C"))
HEADS = (Field("weight", "S C d"), Field("bias", "S C"))
# Quadratic discriminants with a diagonal covariance of each class.
DIAGONALS = (Field("means", "C d"), Field("whiteners", "C d"), Field("bias", "C", bits=64))
# FedBE and FedKT also need the moments of a site's features, to draw synthetic features at the coordinator.
HEAD_AND_FEATURES = (*HEAD, Field("mean", "d"), Field("deviation", "d", 0))

# Records and sums of features by class, and second moment around the class means, of which least squares needs no more;
# T = d (d + 1) / 2.
NORMAL_EQUATIONS = (Field("counts", "C", 0, LARGEST_COUNT), Field("sums", "C d"), Field("squares", "T"))
# The same, with the variance of every dimension in each class.
GAUSSIANS = (*NORMAL_EQUATIONS, Field("variances", "C d", 0))

# Records and means of the groups of each class, of which there are g. FEDCOF_KEYS: as above.
GROUP_MEANS = (Field("counts", "C g", 0, LARGEST_COUNT), Field("means", "C g d"))
FEDCOF_KEYS = ("groups", "samples_per_group")


def symbols(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """S: number of sites, if the settings give it."""
    return {"S": max(1, config.sites)}


def triangle(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """T numbers of a symmetric matrix."""
    return {"T": dimension * (dimension + 1) // 2}


def groups(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """g: groups of a class; a message leaves out the zeros of missing ones."""
    return {"g": config.fedcof.groups}


def group_means(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of a mean for every group."""
    return Work(passes=1, numbers=classes * config.fedcof.groups * dimension, components=config.fedcof.groups)


def one_pass(config: RunConfig, classes: int, dimension: int) -> Work:
    """Sums over all records, and the second moment."""
    return Work(passes=1, numbers=dimension * (dimension + classes))


def gaussians(config: RunConfig, classes: int, dimension: int) -> Work:
    """Sums over all records, the second moment, and the variances of each class."""
    return Work(passes=1, numbers=dimension * (dimension + 2 * classes))


def work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of training one head."""
    gradients = GRADIENTS if config.epsilon else 4
    return Work(config.head.min_steps, config.head.epochs, numbers=dimension * classes * gradients)


def work_of_teachers(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of FedKT: a head for every teacher, and synthetic features at the coordinator."""
    one, teachers = work(config, classes, dimension), config.baseline.teachers
    return replace(one, steps=one.steps * teachers, passes=one.passes * teachers, synthetic=config.baseline.synthetic)


def chain_work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of training one head, with sampled records."""
    return replace(work(config, classes, dimension), synthetic=config.head.max_samples)
