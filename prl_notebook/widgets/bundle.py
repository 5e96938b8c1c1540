"""Widgets that also say in text/html and text/plain what they show, in one display bundle."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from prl_notebook.views import View


def static(name: str) -> str:
    """Text of a file in widgets/static."""
    return files("prl_notebook.widgets").joinpath("static", name).read_text(encoding="utf-8")


class Bundled:
    """Mixin before a widget class: the display bundle is the widget view plus `view()`, as of display time.

    Places without widgets (nbconvert, GitHub, a terminal) show the static part.
    """

    def view(self) -> View:
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)  # type: ignore[misc]
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**(data or {}), **self.view()._repr_mimebundle_()}, metadata
