"""Views: pure functions of a RunState, a layout or a group, as HTML and text; no Jupyter and no torch."""

from prl_notebook.views.attention_mask import mask
from prl_notebook.views.base import View
from prl_notebook.views.metric_curves import curves, curves_figure
from prl_notebook.views.period_progress import progress, status
from prl_notebook.views.period_timeline import timeline
from prl_notebook.views.report import report_html
from prl_notebook.views.rollout_queue import queue
from prl_notebook.views.token_colors import group, tokens

__all__ = [
    "View",
    "curves",
    "curves_figure",
    "group",
    "mask",
    "progress",
    "queue",
    "report_html",
    "status",
    "timeline",
    "tokens",
]
