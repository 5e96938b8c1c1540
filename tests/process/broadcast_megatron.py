"""A megatron-core rank that broadcasts over gloo; apart from broadcast_stand_in, since megatron-core is optional."""

from __future__ import annotations

from typing import Any

from broadcast_stand_in import stand_in

from prl_notebook.training.megatron.rank import MegatronTrainerRank


class GlooMegatronRank(MegatronTrainerRank):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in()
        super().__init__(*args, **kwargs)
