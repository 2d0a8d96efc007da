"""Pages from templates: every value in them is escaped, unless it is a trusted picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedsurrogate.common.escapes import for_terminal


def render_page(
    template: str,
    values: Mapping[str, Any],
    folder: Path | None = None,
    filters: Mapping[str, Callable[..., Any]] | None = None,
) -> str:
    """A page, HTML. Texts in it are escaped, and have no character that `for_terminal` replaces.

    Args:
        template: of Jinja, or the name of its file in `folder`.
        values: by the name that the template uses.
        folder: of templates that include each other; None for `template` itself.
        filters: of the template, by name.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=None if folder is None else FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is a text of another type: it stays.
        finalize=lambda value: for_terminal(value) if type(value) is str else value,
    )
    environment.filters.update(filters or {})
    found = (
        environment.from_string(template) if folder is None else environment.get_template(template)
    )
    return found.render(values)


def trusted(markup: str) -> str:
    """Markup of this program, such as a drawn picture: it stays as it is."""
    from markupsafe import Markup

    return Markup(markup)
