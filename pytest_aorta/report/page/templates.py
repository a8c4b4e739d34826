"""The environment of every HTML template: escaped values, and an error where a value is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2


def html_template(
    name: str, read: Callable[[str], str], filters: Mapping[str, Callable[..., Any]] | None = None
) -> jinja2.Template:
    """Return the template ``{name}.html.jinja``, whose file and those that it includes are read by ``read``."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(f"{name}.html.jinja")
