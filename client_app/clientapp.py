"""A site's ClientApp: only numbers, codes and surrogates leave, even after a failure.

Flower sends the text of an uncaught exception in an app to the coordinator, even one during import.
So this module imports only Flower at first, and `_answer` catches every exception.
"""

from __future__ import annotations

from functools import partial

from flwr.app import ConfigRecord, ConfigRecordValues, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsurrogate.common.errors import LOG, FedSurrogateError

app = ClientApp()
# The node-config of this process's own start; None where a run simulates sites.
_own_settings: str | None = None
# In characters.
LONGEST_REASON = 1000
# What a message of each kind asks for; the models of a comparison are evaluated in simulations alone.
WORK_OF = {
    "train": "surrogate",
    "evaluate": "evaluation",
    "query.compare": "comparison",
    "query.name": "name",
    "query.hello": "identification",
    "query.sum_shares": "sum-shares",
    "query.sum_list": "sum-list",
    "query.sum_open": "sum-open",
    "query.head": "head",
}


def app_at_site(settings: str) -> ClientApp:
    """The app of a site in this process, whatever settings come with a message.

    Args:
        settings: the node-config of the site's own start, as one text.
    """
    global _own_settings
    _own_settings = settings
    return app


def _answer(work: str, message: Message, context: Context) -> Message:
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
        LOG.error("%s: %s", error.code, error)
        reported |= {"status": error.code, **_reason(error, context)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not only Exception: libraries call sys.exit, and a panic in a Rust library is a
        # BaseException.
        LOG.exception("unexpected failure")
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
        text = str(error)
        if not isinstance(error, FedSurrogateError):
            text = f"{type(error).__name__}: {text}"
        return {"reason": text[:LONGEST_REASON]} if text else {}
    except Exception:
        return {}


for kind, work in WORK_OF.items():
    category, _, action = kind.partition(".")
    register = app.query(action) if action else getattr(app, category)()
    register(partial(_answer, work))
