"""The views as methods of whatever holds a run: a live Session, or a finished run that was loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl_notebook import views
from prl_notebook.attention.costs import ModelDims
from prl_notebook.attention.layout import Layout
from prl_notebook.engine.records import GroupRecord
from prl_notebook.engine.run_state import RunState
from prl_notebook.views.attention_mask import layout_of
from prl_notebook.views.base import View
from prl_notebook.views.token_colors import Color

if TYPE_CHECKING:
    from prl_notebook.widgets import MaskExplorer


class RunViews:
    """Mixin; needs `state`, `parent` and `groups`."""

    parent: RunState | None
    """state of the run this one was forked from, shown beside it"""

    @property
    def state(self) -> RunState:
        raise NotImplementedError

    @property
    def groups(self) -> Sequence[GroupRecord]:
        raise NotImplementedError

    def inspect(self, group: int) -> GroupRecord:
        """All that is known about a group: texts, rewards, advantages, finish reasons, per-token numbers.

        Raises:
            KeyError: naming the groups there are.
        """
        found = {g.group: g for g in self.groups}
        if group not in found:
            raise KeyError(f"group {group} has not reached the trainer; groups there: {sorted(found)}")
        return found[group]

    @property
    def queue(self) -> View:
        """Every group of the period on its way from waiting to trained."""
        return self._view(views.queue)

    def timeline(self, periods: int = 3) -> View:
        """Who was busy when, in the newest periods."""
        return self._view(lambda state: views.timeline(state, periods))

    def progress(self) -> View:
        """How far the period is, and the last period's metrics beside those of the one before."""
        return self._view(views.progress)

    def curves(self) -> View:
        """Metrics over periods; a fork's beside those of the run it came from."""
        return self._view(lambda state: views.curves(state, self.parent))

    def group(self, group: int) -> View:
        """The K completions of a group side by side."""
        return views.group(self.inspect(group))

    def tokens(self, group: int, completion: int = 0, color: Color = "advantage") -> View:
        """One completion token by token, coloured by 'advantage', 'loss', 'kl', 'ratio', 'entropy', or a log-prob."""
        loss_type = self.state.config.get("grpo", {}).get("loss_type")
        return views.tokens(self.inspect(group), completion, color, loss_type)

    def layout(self, group: int) -> Layout:
        """The packed micro-step in which a group was trained (or, before that, the group alone)."""
        record = self.inspect(group)
        together = [r for r in self.groups if record.micro_step is not None and r.micro_step == record.micro_step]
        return layout_of(together or [record], self.state)

    def mask(self, group: int) -> MaskExplorer:
        """The attention mask of the micro-step in which a group was trained, to zoom into and point at."""
        from prl_notebook.widgets import MaskExplorer  # brings Jupyter, which a script does not need

        layout = self.layout(group)
        there = {g for g, _ in layout.sequences}
        return MaskExplorer(layout, [r for r in self.groups if r.group in there], self._dims())

    def _dims(self) -> ModelDims | None:
        """Sizes of the model, to count operations; None where its folder is gone (a run from another machine)."""
        folder = Path(self.state.model)
        return ModelDims.from_folder(folder) if (folder / "config.json").is_file() else None

    def _view(self, draw: Callable[[RunState], View]) -> View:
        """A view of the run as it is now; a live run adds the widget that follows it."""
        return draw(self.state)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The dashboard or player with its static form; only the static form where there are no widgets."""
        return self._shown()._repr_mimebundle_(**kwargs)

    def _shown(self) -> Any:
        raise NotImplementedError
