"""Widgets: thin shells around views, for notebooks; each also carries its static form."""

from prl_notebook.widgets.completions import CompletionExplorer
from prl_notebook.widgets.dashboard import Dashboard
from prl_notebook.widgets.live import LiveView
from prl_notebook.widgets.mask import MaskExplorer
from prl_notebook.widgets.replay import ReplayPlayer

__all__ = ["CompletionExplorer", "Dashboard", "LiveView", "MaskExplorer", "ReplayPlayer"]
