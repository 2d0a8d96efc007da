"""One step of a chain: open the received chain message, extend it, keep the site's own head, and pass the
chain message on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedsurrogate.common.errors import DataError, SealError
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.security.sealing import open_sealed, seal
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import Info

from ..node_config import NodeConfig
from ..offline.keys import private_key, received_keys
from .evaluation import compare
from .job import Job, MethodOutput

Step = Callable[[Job], tuple[MethodOutput, Head]]
OPEN_HEAD = "head.pb"


def pass_on(job: Job, step: Step) -> MethodOutput:
    """The chain message that this site passes on: `step` makes it from the received one.

    Args:
        job: the request, with the received chain message; the first site of a chain has none.
        step: makes the output and the site's own head.

    Raises:
        SealError: for a chain message that was changed, or was not sealed for this site; and as `step`.
    """
    sealed = job.run.settings.fedpft.seal
    payload = _opened(job) if sealed and job.payload is not None else job.payload
    made, head = step(replace(job, payload=payload))
    if sealed:
        named = str(job.info.get("readers", "")).split(",")
        readers = {name: key for name, key in _keys(job.node, job.info).items() if name in named}
        context = _context(job.run.digest, job.lineage, job.site, job.info.get("hop"))
        made = replace(
            made,
            payload=seal(made.payload, private_key(job.node, job.site), readers, context),
            sealed=True,
        )
    # Only the head of an open chain can be requested later. A head from sealed or private chain messages
    # has another file name, so no later request finds it, whatever settings that request has.
    confidential = sealed or job.run.private
    file = job.state / ("confidential-head.pb" if confidential else OPEN_HEAD)
    return replace(made, answer=_worth(job, head), keep={file: pack_classifier(head)})


def kept_head(state: Path) -> Classifier:
    """The head that this site kept from its step of an unsealed chain.

    Args:
        state: folder of the run at this site.

    Raises:
        DataError: when it has none.
    """
    file = state / OPEN_HEAD
    if not file.is_file():
        raise DataError(f"no head of this run in {str(file)!r}")
    return unpack_classifier(file.read_bytes())


def _opened(job: Job) -> bytes:
    sender, keys = str(job.info.get("sender", "")), _keys(job.node, job.info)
    if sender not in keys:
        raise SealError(f"a sealed chain message from {sender[:64]!r}, whose key was not received")
    assert job.payload is not None
    context = _context(job.run.digest, job.lineage, sender, job.info.get("sent-hop"))
    return open_sealed(
        job.payload, job.site, private_key(job.node, job.site), keys[sender], context
    )


def _keys(node: NodeConfig, info: Mapping[str, object]) -> dict[str, bytes]:
    return received_keys(node, info.get("keys", "{}"))


def _context(run: str, lineage: str, sender: str, number: object) -> bytes:
    return "\0".join((run, lineage, sender, str(number))).encode()


def _worth(job: Job, head: Head) -> Info:
    """The head's accuracy on all test data of a simulation. A hospital reports one only when an
    evaluation is requested.
    """
    if not job.found.simulated:
        return {}
    return {"accuracy.model": compare(head, job.run, job.node, baselines=False)["accuracy.model"]}
