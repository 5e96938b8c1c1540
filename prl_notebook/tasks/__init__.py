"""What is trained on what: `resolve_task` turns a user's model, dataset and reward functions into a `Task`.

Bundled by name, both as `model` and as `dataset`: "tiny" (the default), "tiny-preamble-512" (the same with a shared
512-token few-shot system message) and "smollm2-135m" (an optional package). Models come from folders; nothing here
downloads one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl_notebook.config import Config
from prl_notebook.tasks.datasets import Row, load_dataset
from prl_notebook.tasks.rewards import RewardFunction, check_functions
from prl_notebook.tasks.tiny import running_sum_reward, tiny_model_path, tiny_preset, tiny_rows
from prl_notebook.tasks.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """A model, a dataset and reward functions that fit together."""

    name: str
    model_path: Path
    """Hugging Face folder with config.json, weights and tokenizer."""
    rows: list[Row] = field(repr=False)
    reward_funcs: tuple[RewardFunction, ...]
    preset: Config
    """Settings to start from; the bundled tasks learn with theirs."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Loaded when first asked for."""
        return load_tokenizer(self.model_path)

    @property
    def context_length(self) -> int | None:
        """Most tokens the model takes (`max_position_embeddings`), where its configuration says so."""
        return json.loads((self.model_path / "config.json").read_text()).get("max_position_embeddings")


@dataclass(frozen=True)
class _Bundled:
    model_path: Callable[[], Path]
    rows: Callable[[], list[Row]]
    reward: RewardFunction
    preset: Callable[[], Config]


def _tiny(preamble_tokens: int = 0) -> _Bundled:
    return _Bundled(
        tiny_model_path, lambda: tiny_rows(preamble_tokens=preamble_tokens), running_sum_reward, tiny_preset
    )


def _smollm2() -> _Bundled:
    from prl_notebook.tasks import smollm2

    return _Bundled(smollm2.smollm2_model_path, smollm2.addition_rows, smollm2.addition_reward, smollm2.smollm2_preset)


_BUNDLED: dict[str, Callable[[], _Bundled]] = {
    "tiny": _tiny,
    "tiny-preamble-512": lambda: _tiny(preamble_tokens=512),
    "smollm2-135m": _smollm2,
}


def resolve_task(
    model: str | Path | None = None,
    dataset: Any = None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
) -> Task:
    """Find model, rows and reward functions; what is None comes from the bundled task.

    Args:
        model: a bundled name, or a model folder in Hugging Face format. None: "tiny".
        dataset: a bundled name, or what `load_dataset` takes. None: the bundled model's own.
        reward_funcs: one or several TRL-style functions. None: the bundled dataset's own, or reasoning_gym's score.

    Raises:
        FileNotFoundError: no such model folder or dataset file.
        ImportError: an optional package is missing.
        ValueError: a part is missing or malformed; see `load_dataset` and `check_functions`.
    """
    name = "tiny" if model is None else str(model)
    bundled_model = _BUNDLED[name]() if name in _BUNDLED else None
    model_path = bundled_model.model_path() if bundled_model else _model_folder(name)
    preset = bundled_model.preset() if bundled_model else Config()

    if dataset is None and bundled_model is None:
        raise ValueError(f"model {name!r} comes without a dataset; pass dataset= and reward_funcs=")
    bundled_data = _BUNDLED[dataset]() if isinstance(dataset, str) and dataset in _BUNDLED else None
    if dataset is None:
        bundled_data = bundled_model
    rows = bundled_data.rows() if bundled_data else load_dataset(dataset)

    if reward_funcs is None:
        reward_funcs = _own_reward(dataset, bundled_data)
    functions = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
    check_functions(functions, None, columns=rows[0] if rows else None)
    return Task(name, model_path, rows, functions, preset)


def _own_reward(dataset: Any, bundled: _Bundled | None) -> RewardFunction:
    if bundled is not None:
        return bundled.reward
    if isinstance(dataset, str) and dataset.startswith("reasoning_gym:"):
        from prl_notebook.tasks.reasoning import reasoning_gym_reward

        return reasoning_gym_reward
    raise ValueError("your own dataset needs reward_funcs=: a function or a list of functions")


def _model_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"model folder {name!r} does not exist; give a folder in Hugging Face format "
            f"(`hf download NAME --local-dir FOLDER` makes one) or one of {', '.join(map(repr, _BUNDLED))}"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model folder {name!r} has no config.json, so it is not in Hugging Face format")
    return folder
