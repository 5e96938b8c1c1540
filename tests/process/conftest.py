"""Fixtures of the tests on megatron-core: one pool of rank processes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from megatron_ranks import RankPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def rank_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny random model; `rank_model("qwen2", tied=True, seed=1)`."""
    from megatron_cases import save_model

    root = tmp_path_factory.mktemp("models")

    @cache
    def make(kind: str = "qwen3", tied: bool = False, seed: int = 0) -> Path:
        return save_model(root / f"{kind}-{tied}-{seed}", kind, tied, seed)

    return make
