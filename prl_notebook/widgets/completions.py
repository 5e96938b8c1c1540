"""Choose a group, a completion and a colour; see the group side by side and the completion token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import ipywidgets as ipw

from prl_notebook.engine.records import GroupRecord
from prl_notebook.views import View, group, tokens
from prl_notebook.views.base import joined, message
from prl_notebook.views.token_colors import Color
from prl_notebook.widgets.bundle import Bundled
from prl_notebook.widgets.panes import Panes


class CompletionExplorer(Bundled, ipw.VBox):
    """The groups of one period."""

    def __init__(self, records: Sequence[GroupRecord] = (), loss_type: str | None = None) -> None:
        self._loss_type = loss_type
        self._records: dict[int, GroupRecord] = {}
        self._group = ipw.Dropdown(description="group")
        self._completion = ipw.Dropdown(description="completion")
        self._color = ipw.Dropdown(description="colour by", options=get_args(Color), value="advantage")
        self._panes = Panes()
        super().__init__([ipw.HBox([self._group, self._completion, self._color]), self._panes])
        self._group.observe(self._choose_group, "value")
        self._completion.observe(self._draw, "value")
        self._color.observe(self._draw, "value")
        self.load(records)

    def load(self, records: Sequence[GroupRecord]) -> None:
        """Show another period's groups; the chosen group stays where there is one of that number."""
        chosen = self._group.value
        self._records = {r.group: r for r in records}
        self._group.options = list(self._records)
        if self._records:
            self._group.value = chosen if chosen in self._records else next(iter(self._records))
        self._choose_group()

    def view(self) -> View:
        """Group and completion as they are chosen now."""
        record = self._records.get(self._group.value)
        if record is None:
            return message("No completions are recorded for this period.")
        completion, color = self._completion.value, self._color.value
        if completion is None:
            return group(record)
        if color != "advantage" and color not in record.completions[completion].numbers:
            return joined([message(f"{color} was not recorded for this completion."), group(record)])
        return joined([tokens(record, completion, color, self._loss_type), group(record)])

    def _choose_group(self, _: Any = None) -> None:
        record = self._records.get(self._group.value)
        chosen = self._completion.value or 0
        self._completion.options = range(len(record.completions)) if record else ()
        if record and record.completions:
            self._completion.value = min(chosen, len(record.completions) - 1)
        self._draw()

    def _draw(self, _: Any = None) -> None:
        self._panes.show({"detail": self.view()})
