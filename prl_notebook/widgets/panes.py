"""Panes of HTML that are replaced when they change, and nothing else: what a live view is drawn in."""

from __future__ import annotations

from collections.abc import Mapping

import anywidget
import traitlets

from prl_notebook.views import View
from prl_notebook.views.base import CSS
from prl_notebook.widgets.bundle import static


class Panes(anywidget.AnyWidget):
    """One widget with a pane per view, so that an update of several views is one message."""

    _esm = static("panes.js")
    _css = CSS

    live = traitlets.Bool(False).tag(sync=True)
    """a run goes on: the page then draws as often as it can cheaply, the newest state, so as not to slow the run"""
    status = traitlets.Unicode().tag(sync=True)
    progress = traitlets.Unicode().tag(sync=True)
    queue = traitlets.Unicode().tag(sync=True)
    timeline = traitlets.Unicode().tag(sync=True)
    curves = traitlets.Unicode().tag(sync=True)
    detail = traitlets.Unicode().tag(sync=True)

    def show(self, views: Mapping[str, View], live: bool = False) -> None:
        """Replace panes; those that did not change are not sent. All in one message, `live` with them."""
        with self.hold_sync():
            self.live = live
            for name, view in views.items():
                setattr(self, name, str(view.body))
