"""Tools that all pages share: templates that escape, filters that print numbers, data for scripts.

Jinja2 and `markupsafe` escape all text from outside, names above all. The data of tooltips is JSON without any ``<``,
so no name can end its element.
"""

import json
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from autopar._version import __version__
from autopar.report import words
from autopar.search.result.format import plan_in_words, readable_value
from autopar.words import numbers


def script_json(data: Any) -> Markup:
    """JSON for a script element: without ``<``, ``>`` and ``&``, and without the line ends that only JavaScript has."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def environment() -> Environment:
    """Templates of this package, with everything that they use."""

    def load(name: str) -> str:
        return resources.files("autopar.report").joinpath(name).read_text(encoding="utf-8")

    env = Environment(
        loader=FunctionLoader(load), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {
        "amount": numbers.amount,
        "bytes": numbers.readable_bytes,
        "seconds": numbers.readable_seconds,
        "percent": numbers.percent,
        "quantity": numbers.quantity,
        "value": readable_value,
        "capped": numbers.capped,
        "degrees": words.degrees_in_words,
        "plan": plan_in_words,
    }
    env.globals |= {"words": words, "style": Markup(load("style.css")), "script": Markup(load("script.js"))}
    return env


def render(template: str, data: Any = None, **values: Any) -> str:
    """A page. `data` is what its script reads."""
    return environment().get_template(template).render(data=script_json(data or {}), version=__version__, **values)
