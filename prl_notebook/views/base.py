"""What all views share: the `View` they return, the template environment and number formats.

HTML is written in Jinja templates under static/ with autoescaping on, so text of models, datasets and exceptions cannot
become markup. Left out on purpose: JavaScript. A view reads the same in a notebook, an e-mail and a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Generic, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

T = TypeVar("T")

CSS = files("prl_notebook.views").joinpath("static/style.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class View:
    """A picture of a run: `html` needs nothing but itself, `text` is the same for a terminal."""

    body: Markup
    """HTML without the style sheet, for places that bring it once."""
    text: str
    widget: Callable[[], Any] | None = field(default=None, compare=False)
    """makes the widget that follows the run, for a view of a run that goes on"""

    @property
    def html(self) -> str:
        return f"<style>{CSS}</style>{self.body}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        if self.widget:
            return self.widget()._repr_mimebundle_()
        return {"text/html": self.html, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text


class Same(Generic[T]):
    """An object as a cache key, by identity: states share whatever did not change, and it never changes later."""

    __slots__ = ("object",)

    def __init__(self, object: T) -> None:
        self.object = object

    def __hash__(self) -> int:
        return id(self.object)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.object is self.object


def render(template: str, **values: Any) -> Markup:
    """The template `static/{template}.html` with `values`, which are escaped."""
    return Markup(_environment.get_template(f"{template}.html").render(values))


def joined(views: Iterable[View]) -> View:
    """Several views below each other as one."""
    views = list(views)
    return View(Markup("").join(v.body for v in views), "\n\n".join(v.text for v in views))


def message(text: str) -> View:
    """A sentence where a view would be."""
    return View(render("message", text=text), text)


def number(value: float | None) -> str:
    """Four significant digits; a dash where there is no number."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    return f"{value:.0f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.1f} ms"


def rough(value: float) -> str:
    """An estimate of seconds: not more digits than it deserves, so that it does not change all the time."""
    return seconds(round(value, -1)) if value >= 60 else f"{max(1, round(value))} s"


def percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.0f} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_environment = Environment(
    loader=PackageLoader("prl_notebook.views", "static"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_environment.filters |= {"number": number, "seconds": seconds, "percent": percent}
