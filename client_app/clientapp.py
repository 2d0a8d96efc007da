"""A site's ClientApp: only numbers, codes and surrogates leave, even after a failure.

Flower sends the text of an uncaught exception in an app to the coordinator, even one during import.
So this module imports only Flower at first, and `_answer` catches every exception.
"""

from __future__ import annotations

import logging

from flwr.app import ConfigRecord, ConfigRecordValues, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsurrogate.common.errors import FedSurrogateError

log = logging.getLogger("fedsurrogate.site")
app = ClientApp()
_own_settings: str | None = None
"""The node-config of this process's own start; None where a run simulates sites."""
# In characters.
LONGEST_REASON = 1000


@app.train()
def train(message: Message, context: Context) -> Message:
    """Make this site's surrogate."""
    return _answer(message, context, "surrogate")


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model on this site's own test split."""
    return _answer(message, context, "evaluation")


@app.query("compare")
def query(message: Message, context: Context) -> Message:
    """In a simulation, evaluate the model on all test data and compare it with baselines."""
    return _answer(message, context, "comparison")


@app.query("name")
def name(message: Message, context: Context) -> Message:
    """Report the site's name only."""
    return _answer(message, context, "name")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Report the site's name, and the fingerprint and dimension that a model must match."""
    return _answer(message, context, "identification")


@app.query("sum_shares")
def sum_shares(message: Message, context: Context) -> Message:
    """Share this site's secrets of secure aggregation among its sites."""
    return _answer(message, context, "sum-shares")


@app.query("sum_list")
def sum_list(message: Message, context: Context) -> Message:
    """Sign the list of the sites in secure aggregation."""
    return _answer(message, context, "sum-list")


@app.query("sum_open")
def sum_open(message: Message, context: Context) -> Message:
    """Reveal the shares that complete secure aggregation."""
    return _answer(message, context, "sum-open")


@app.query("head")
def head(message: Message, context: Context) -> Message:
    """Release the head that this site trained in a chain."""
    return _answer(message, context, "head")


def app_at_site(settings: str) -> ClientApp:
    """The app of a site in this process, whatever settings come with a message.

    Args:
        settings: the node-config of the site's own start, as one text.
    """
    global _own_settings
    _own_settings = settings
    return app


def _answer(message: Message, context: Context, work: str) -> Message:
    """Do the work; on a failure report only a code to the coordinator, and write the details to
    this site's own log.
    """
    reported: dict[str, ConfigRecordValues] = {"status": "internal"}
    try:
        from fedsurrogate.common.files import owner_only

        with owner_only():
            from .requests import answer, identify_site

            run = (context.run_config, str(context.run_id))
            node, site = identify_site(context.node_config, context.node_id, run, _own_settings)
            reported["site"] = site
            return Message(answer(work, message.content, *run, node, site), reply_to=message)
    except FedSurrogateError as error:
        log.error("%s: %s", error.code, error)
        reported |= {"status": error.code, **_reason(error, context)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not only Exception: libraries call sys.exit, and a panic in a Rust library is a
        # BaseException.
        log.exception("unexpected failure")
        reported |= _reason(error, context)
    return Message(RecordDict({"info": ConfigRecord(reported)}), reply_to=message)


def _reason(error: BaseException, context: Context) -> dict[str, ConfigRecordValues]:
    """The error's text, for a simulated site only: it has no data of its own, and runs on the
    coordinator's machine.

    The process decides whether it simulates, never a message. A site with its own data never sends
    a text.
    """
    try:
        from .features.site_features import in_simulation

        if _own_settings is not None or context.node_config.get("data") or not in_simulation():
            return {}
        text = (
            str(error)
            if isinstance(error, FedSurrogateError)
            else f"{type(error).__name__}: {error}"
        )
        return {"reason": text[:LONGEST_REASON]} if text else {}
    except Exception:
        return {}
