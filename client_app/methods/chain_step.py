"""One step of a chain: open the received relay, extend it, keep the site's own head, and pass the
relay on.
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
from .pooled_baselines import compare
from .task import MethodOutput, Task

Step = Callable[[Task], tuple[MethodOutput, Head]]
OPEN_HEAD = "head.pb"


def pass_on(task: Task, step: Step) -> MethodOutput:
    """The relay that this site passes on: `step` makes it from the received one.

    Args:
        task: the request, with the received relay; the first site of a chain has none.
        step: makes the output and the site's own head.

    Raises:
        SealError: for a relay that was changed, or was not sealed for this site; and as `step`.
    """
    sealed = task.run.settings.fedpft.seal
    payload = _opened(task) if sealed and task.payload is not None else task.payload
    made, head = step(replace(task, payload=payload))
    if sealed:
        named = str(task.info.get("readers", "")).split(",")
        readers = {name: key for name, key in _keys(task.node, task.info).items() if name in named}
        context = _context(task.run.digest, task.lineage, task.site, task.info.get("hop"))
        made = replace(
            made,
            payload=seal(made.payload, private_key(task.node, task.site), readers, context),
            sealed=True,
        )
    # Only the head of an open chain can be requested later. A head from sealed or private relays
    # has another file name, so no later request finds it, whatever settings that request has.
    confidential = sealed or task.run.private
    file = task.state / ("confidential-head.pb" if confidential else OPEN_HEAD)
    return replace(made, answer=_worth(task, head), keep={file: pack_classifier(head)})


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


def _opened(task: Task) -> bytes:
    sender, keys = str(task.info.get("sender", "")), _keys(task.node, task.info)
    if sender not in keys:
        raise SealError(f"a sealed relay from {sender[:64]!r}, whose key was not received")
    assert task.payload is not None
    context = _context(task.run.digest, task.lineage, sender, task.info.get("sent-hop"))
    return open_sealed(
        task.payload, task.site, private_key(task.node, task.site), keys[sender], context
    )


def _keys(node: NodeConfig, info: Mapping[str, object]) -> dict[str, bytes]:
    return received_keys(node, info.get("keys", "{}"))


def _context(run: str, lineage: str, sender: str, number: object) -> bytes:
    return "\0".join((run, lineage, sender, str(number))).encode()


def _worth(task: Task, head: Head) -> Info:
    """The head's accuracy on all test data of a simulation. A hospital reports one only when an
    evaluation is requested.
    """
    if not task.found.simulated:
        return {}
    return {"accuracy.model": compare(head, task.run, task.node, baselines=False)["accuracy.model"]}
