"""A site's ClientApp: whatever happens in here, only numbers, codes and surrogates leave.

Flower sends the text of an exception that escapes an app to the coordinator, one at its import included. So nothing but
Flower is imported before the guard stands, and nothing is left to escape it.
"""

from __future__ import annotations

import logging

from flwr.app import ConfigRecord, ConfigRecordValues, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from common.errors import FedSurrogateError

log = logging.getLogger("fedsurrogate.site")
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Make this site's surrogate."""
    return _answer(message, context, "surrogate")


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Judge the head on this site's own test split."""
    return _answer(message, context, "evaluation")


@app.query("compare")
def query(message: Message, context: Context) -> Message:
    """In a simulation, judge the model on all test data, next to baselines."""
    return _answer(message, context, "comparison")


@app.query("name")
def name(message: Message, context: Context) -> Message:
    """Say who this site is, and nothing else."""
    return _answer(message, context, "name")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say who this site is, and what a model for it must look like."""
    return _answer(message, context, "introduction")


@app.query("head")
def head(message: Message, context: Context) -> Message:
    """Release the head this site has learned in a chain."""
    return _answer(message, context, "head")


def _answer(message: Message, context: Context, work: str) -> Message:
    """Do the work; on any failure tell the coordinator a code, and keep the detail in this site's own log."""
    reported: dict[str, ConfigRecordValues] = {"status": "internal"}
    try:
        from client_app.requests import answer, introduce

        node, site = introduce(context.node_config, context.node_id)
        reported["site"] = site
        return Message(answer(work, message.content, context.run_config, str(context.run_id), node, site), reply_to=message)
    except FedSurrogateError as error:
        log.error("%s: %s", error.code, error)
        reported["status"] = error.code
    except KeyboardInterrupt:
        raise
    except BaseException:
        # Not only what is an Exception: libraries call sys.exit, and a panic in one written in Rust is none.
        log.exception("unexpected failure")
    return Message(RecordDict({"info": ConfigRecord(reported)}), reply_to=message)
