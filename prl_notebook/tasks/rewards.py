"""Calls TRL-style reward functions for one group of completions and adds their rewards up.

A reward function is called by keyword with `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_extra`,
`log_metric` and the dataset's columns, each list with one entry per completion, and returns one number or None
(abstains) per completion. It gets only the keywords it accepts. Any callable will do, sync or async.

Left out on purpose: reward models given as a name or an nn.Module (wrap them in a function), time limits and what an
exception means for the run (the reward process's business).

Arrays: K = completions of the group.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from prl_notebook.engine.types import Group, Prompt
from prl_notebook.tasks.tokenizer import load_tokenizer

RewardFunction = Callable[..., Any]
Decode = Callable[[list[list[int]]], list[str]]
"""Sampled ids of several completions -> their texts."""
STANDARD_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class RewardError(RuntimeError):
    """A reward function raised; the message names it and the cause is chained."""


@dataclass(frozen=True)
class TrainerState:
    """What a reward function may know about the run (TRL's `trainer_state`, as far as it exists here)."""

    global_step: int
    """Optimizer steps done before this period."""
    period: int


@dataclass
class RewardResult:
    """Rewards of one group."""

    rewards_K: np.ndarray
    """float64 [K], weighted sum over the functions that did not abstain; NaN where all did."""
    by_function: dict[str, np.ndarray]
    """float64 [K] per function, unweighted, NaN = abstained."""
    logs: dict[str, list[Any]] = field(default_factory=dict)
    """Columns given to log_extra, K values each."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers given to log_metric; the mean where a name was given several times."""


def function_names(functions: Sequence[RewardFunction]) -> list[str]:
    """A unique display name per function; later ones of the same name are numbered: `f`, `f_2`, `f_3`."""
    names: list[str] = []
    for function in functions:
        base = _name(function)
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def check_functions(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None, columns: Iterable[str] | None = None
) -> None:
    """Find out before a run what would fail in its first period.

    Raises:
        ValueError: no functions, something that is not callable, a wrong number of weights, or (where `columns` of the
            dataset are given) a parameter that nothing will be passed for.
    """
    if not functions:
        raise ValueError("reward_funcs is empty; pass at least one reward function")
    for function in functions:
        if not callable(function):
            raise ValueError(f"reward_funcs: {function!r} is a {type(function).__name__}, not a callable")
    if weights is not None and len(weights) != len(functions):
        raise ValueError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
    if columns is None:
        return
    columns = [column for column in columns if column != "prompt"]
    for name, function in zip(function_names(functions), functions, strict=True):
        for parameter in _parameters(function).values():
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if needed and parameter.name not in (*STANDARD_KEYWORDS, *columns):
                raise ValueError(
                    f"reward function {name!r} needs {parameter.name!r}, which is no column of the dataset; "
                    f"its columns are {', '.join(columns) or '(none besides prompt)'}"
                )


def _parameters(function: RewardFunction) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _accepts(function: RewardFunction) -> set[str] | None:
    """Keywords that a function takes; None: any."""
    parameters = _parameters(function).values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def load_decode(model_path: str | Path, skip_special_tokens: bool = True) -> Decode:
    """Decoder of a Hugging Face folder; special tokens are left out by default, as TRL does.

    tokenizer.json is read without transformers, which would bring torch along: seconds of every start of the reward
    process.
    """
    file = Path(model_path) / "tokenizer.json"
    if file.is_file():
        return functools.partial(Tokenizer.from_file(str(file)).decode_batch, skip_special_tokens=skip_special_tokens)
    return functools.partial(load_tokenizer(model_path).batch_decode, skip_special_tokens=skip_special_tokens)


class RewardSet:
    """A run's reward functions with their weights.

    Args:
        functions: TRL-style reward functions.
        weights: one per function; None: all 1.
        decode: makes the completions' texts from the sampled ids; see `load_decode`.

    Raises:
        ValueError: see `check_functions`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None,
        decode: Decode,
    ) -> None:
        check_functions(functions, weights)
        self.names = function_names(functions)
        self._functions = list(functions)
        self._accepts = [_accepts(function) for function in functions]
        self._weights = np.ones(len(functions)) if weights is None else np.asarray(weights, dtype=np.float64)
        self._decode = decode
        self._runner = asyncio.Runner()  # one event loop for all calls: async functions may keep connections open

    def score(self, group: Group, prompt: Prompt, state: TrainerState) -> RewardResult:
        """Score one group; sync functions run one after another, async ones together after them.

        Raises:
            RewardError: a function raised.
            ValueError: a function returned something else than K numbers or None.
        """
        completion_ids = [completion.ids_R.tolist() for completion in group.completions]
        count = len(completion_ids)
        texts = self._decode(completion_ids)
        logs: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}

        def log_extra(column: str, values: Iterable[Any]) -> None:
            logs[column] = list(values)
            if len(logs[column]) != count:
                raise ValueError(f"log_extra({column!r}) got {len(logs[column])} values for {count} completions")

        def log_metric(name: str, value: float) -> None:
            metrics.setdefault(name, []).append(float(value))

        keywords = {
            **{name: [value] * count for name, value in prompt.columns.items()},
            "prompts": [prompt.prompt] * count,
            "completions": texts if isinstance(prompt.prompt, str) else _as_messages(texts),
            "completion_ids": completion_ids,
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        by_function = {
            name: _as_rewards(name, output, count)
            for name, output in zip(self.names, self._call_all(keywords), strict=True)
        }
        rewards_FK = np.stack(list(by_function.values()))  # F = functions
        rewards_K = np.nansum(rewards_FK * self._weights[:, None], axis=0)
        rewards_K[np.isnan(rewards_FK).all(axis=0)] = np.nan
        means = {name: float(np.mean(values)) for name, values in metrics.items()}
        return RewardResult(rewards_K, by_function, logs, means)

    def close(self) -> None:
        """End the event loop of async functions."""
        self._runner.close()

    def _call_all(self, keywords: dict[str, Any]) -> list[Any]:
        outputs = []
        for name, function, accepts in zip(self.names, self._functions, self._accepts, strict=True):
            taken = keywords if accepts is None else {key: keywords[key] for key in keywords if key in accepts}
            try:
                outputs.append(function(**taken))
            except Exception as error:
                raise _reward_error(name, error) from error
        if any(inspect.isawaitable(output) for output in outputs):
            return self._runner.run(self._await_all(outputs))
        return outputs

    async def _await_all(self, outputs: list[Any]) -> list[Any]:
        """Finish every awaitable, also after one has failed, so that none is left running in the loop."""
        pending = [index for index, output in enumerate(outputs) if inspect.isawaitable(output)]
        finished = await asyncio.gather(*(outputs[index] for index in pending), return_exceptions=True)
        for index, result in zip(pending, finished, strict=True):
            if isinstance(result, BaseException):
                raise _reward_error(self.names[index], result) from result
            outputs[index] = result
        return outputs


def _as_messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def _reward_error(name: str, error: BaseException) -> RewardError:
    return RewardError(f"reward function {name!r} raised {type(error).__name__}: {error}")


def _as_rewards(name: str, output: Any, count: int) -> np.ndarray:
    """float64 [K] with NaN for None."""
    if isinstance(output, str) or not isinstance(output, Iterable):
        raise ValueError(
            f"reward function {name!r} returned {output!r}; it must return a list of {count} numbers or None"
        )
    values = list(output)
    if len(values) != count:
        raise ValueError(
            f"reward function {name!r} returned {len(values)} rewards for {count} completions; "
            "it must return one number or None per completion"
        )
    return np.array([_as_reward(name, value) for value in values])


def _as_reward(name: str, value: Any) -> float:
    if value is None:
        return np.nan
    # __float__ rather than numbers.Real: zero-dimensional arrays and tensors count; strings have no __float__.
    number = float(value) if hasattr(value, "__float__") else np.inf
    if np.isinf(number):
        raise ValueError(
            f"reward function {name!r} returned {value!r} among its rewards; expected a finite number or None"
        )
    return number
