"""The attention mask on a canvas, to zoom into and to point at."""

from __future__ import annotations

from collections.abc import Sequence

import anywidget
import traitlets

from prl_notebook.attention.costs import ModelDims
from prl_notebook.attention.layout import Layout
from prl_notebook.engine.records import GroupRecord
from prl_notebook.views import View, mask
from prl_notebook.views.attention_mask import both_layouts, facts, mask_data
from prl_notebook.views.base import CSS
from prl_notebook.widgets.bundle import Bundled, static


class MaskExplorer(Bundled, anywidget.AnyWidget):
    """Shared prompts and the same completions as separate rows; pointing at a pair says who may attend and why."""

    _esm = static("mask.js")
    _css = CSS
    data = traitlets.Dict().tag(sync=True)

    def __init__(self, layout: Layout, records: Sequence[GroupRecord] = (), dims: ModelDims | None = None) -> None:
        """
        Args:
            records: groups of the layout, for the text of their tokens.
            dims: sizes of the model, to count operations.
        """
        shared, separate = both_layouts(layout)
        super().__init__(
            data={
                "kind": layout.kind,
                "shared": mask_data(shared, records),
                "separate": mask_data(separate, records),
                "facts": str(facts(layout, dims)),
            }
        )
        self._view = mask(layout, dims)

    def view(self) -> View:
        return self._view
