"""Datasets in TRL's conventions, and the prompts of each period.

A dataset has a column `prompt` (a string, or a list of {"role", "content"} messages); every other column goes to the
reward functions. Rows are kept in memory as dicts, prompts as token ids.

Left out on purpose: streaming datasets (a run must be able to come back to any period), images, tools in the chat
template, cutting of long prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from prl_notebook.config import GRPO
from prl_notebook.engine.seeds import derive_seed
from prl_notebook.engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Never handed to reward functions as dataset columns, as in TRL: the last two mean the sampled ones there."""


def load_dataset(source: Any) -> list[Row]:
    """Rows of a dataset.

    Args:
        source: a list of dicts; a `datasets.Dataset`; the path of a .jsonl or .parquet file; "reasoning_gym:TASK"; or
            a name on the Hugging Face hub with an optional split, "NAME:SPLIT" (default "train").

    Raises:
        FileNotFoundError: no such .jsonl or .parquet file.
        ImportError: "reasoning_gym:..." without the package.
        ValueError: an unknown kind of file, a malformed line, a dataset with several splits, or a streaming one.
    """
    if isinstance(source, (str, Path)):
        return _load_named(source)
    if isinstance(source, dict):
        splits = ", ".join(map(repr, source))
        raise ValueError(
            f"dataset is a mapping with the keys {splits}; pass one split, e.g. dataset[{next(iter(source))!r}]"
        )
    if hasattr(source, "to_list") and hasattr(source, "__len__"):  # a datasets.Dataset; a streaming one has no length
        return source.to_list()
    if not isinstance(source, (list, tuple)):
        raise ValueError(
            f"dataset is a {type(source).__name__}, which cannot be indexed, but a run must be able to come back to "
            "any period; take the rows you need first: datasets.Dataset.from_list(list(stream.take(1000)))"
        )
    for index, row in enumerate(source):
        if not isinstance(row, dict):
            raise ValueError(f"dataset row {index} is a {type(row).__name__}, not a dict with a column 'prompt'")
    return list(source)


def _load_named(source: str | Path) -> list[Row]:
    path = Path(source)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise FileNotFoundError(f"dataset file {str(path)!r} does not exist")
        return pq.read_table(path).to_pylist() if path.suffix == ".parquet" else _read_jsonl(path)
    if path.exists():
        raise ValueError(f"dataset {str(path)!r} must be a .jsonl or .parquet file")
    name, _, rest = str(source).partition(":")
    if name == "reasoning_gym":
        from prl_notebook.tasks.reasoning import reasoning_rows

        return reasoning_rows(rest)
    import datasets  # slow to import, and only needed here

    return datasets.load_dataset(name, split=rest or "train").to_list()


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number}: a {type(row).__name__}, not a JSON object with the column 'prompt'"
            )
        rows.append(row)
    return rows


class PromptSource:
    """The prompts of every period, as a pure function of seed, period and dataset.

    Rows follow one another epoch after epoch, `prompts_per_period` at a time, each epoch in an order of its own when
    `shuffle_dataset`. Where the dataset's size is no multiple of that, a period takes its last prompts from the next
    epoch: no row is left out. All rows are tokenised and checked when the source is made.

    Args:
        rows: from `load_dataset`.
        tokenizer: a transformers tokenizer; its chat template is applied to messages, strings are tokenised plainly.
        grpo: seed, prompts_per_period, shuffle_dataset, and the length limits.
        context_length: the model's `max_position_embeddings`; None: not checked.

    Raises:
        ValueError: empty dataset, one smaller than a period, a row without or with a malformed `prompt`, messages
            without a chat template, or a prompt that is empty or too long.
    """

    def __init__(
        self,
        rows: list[Row],
        tokenizer: PreTrainedTokenizerBase,
        grpo: GRPO,
        context_length: int | None = None,
    ) -> None:
        if not rows:
            raise ValueError("the dataset is empty")
        if len(rows) < grpo.prompts_per_period:
            raise ValueError(
                f"the dataset has {len(rows)} rows, fewer than prompts_per_period={grpo.prompts_per_period}; "
                "lower prompts_per_period or add rows"
            )
        self._rows = rows
        self._grpo = grpo
        self._ids = _tokenise(rows, tokenizer)
        for index, ids in enumerate(self._ids):
            _check_length(index, len(ids), grpo, context_length)
        self._epoch_order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Rows of the dataset."""
        return len(self._rows)

    def batch(self, period: int) -> list[Prompt]:
        """The period's prompts, in the order in which they are dispatched and numbered."""
        size = self._grpo.prompts_per_period
        return [self._prompt(position) for position in range(period * size, (period + 1) * size)]

    def _prompt(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._rows))
        index = int(self._order(epoch)[place])
        row = self._rows[index]
        columns = {name: value for name, value in row.items() if name not in NOT_COLUMNS}
        return Prompt(index=index, ids=tuple(self._ids[index].tolist()), prompt=row["prompt"], columns=columns)

    def _order(self, epoch: int) -> np.ndarray:
        """Row numbers in the order of one epoch; the latest is remembered."""
        if self._epoch_order[0] != epoch:
            order = np.arange(len(self._rows))
            if self._grpo.shuffle_dataset:
                # Sorting raw bits: unlike Generator.permutation, numpy guarantees them across its versions.
                bits = np.random.PCG64(derive_seed("order", self._grpo.seed, epoch)).random_raw(len(self._rows))
                order = np.argsort(bits, kind="stable")
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]


def _tokenise(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """int32 ids of every row's prompt."""
    messages = [index for index, row in enumerate(rows) if _is_messages(index, row)]
    if messages and tokenizer.chat_template is None:
        raise ValueError(
            f"dataset row {messages[0]}: the prompt is a list of messages, but the tokenizer has no chat template; "
            "set tokenizer.chat_template in the model folder or give prompts as strings"
        )
    texts = sorted(set(range(len(rows))) - set(messages))
    encoded: dict[int, list[int]] = {}
    if messages:
        conversations = [rows[index]["prompt"] for index in messages]
        batch: Any = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)
        encoded.update(zip(messages, batch["input_ids"], strict=True))
    if texts:
        batch = tokenizer([rows[index]["prompt"] for index in texts])
        encoded.update(zip(texts, batch["input_ids"], strict=True))
    return [np.asarray(encoded[index], dtype=np.int32) for index in range(len(rows))]


def _is_messages(index: int, row: Row) -> bool:
    if "prompt" not in row:
        raise ValueError(f"dataset row {index} has no column 'prompt'; its columns are {', '.join(map(str, row))}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return False
    if (
        prompt
        and isinstance(prompt, list)
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
    ):
        return True
    raise ValueError(
        f"dataset row {index}: 'prompt' must be a string or a list of {{'role', 'content'}} messages, "
        f"got {type(prompt).__name__}"
    )


def _check_length(index: int, length: int, grpo: GRPO, context_length: int | None) -> None:
    if length == 0:
        raise ValueError(f"dataset row {index}: the prompt has no tokens")
    if grpo.max_prompt_length is not None and length > grpo.max_prompt_length:
        raise ValueError(
            f"dataset row {index}: the prompt has {length} tokens, more than "
            f"max_prompt_length={grpo.max_prompt_length}; prompts are never cut: raise the limit or drop the row"
        )
    if context_length is not None and length + grpo.max_completion_length > context_length:
        raise ValueError(
            f"dataset row {index}: a prompt of {length} tokens and max_completion_length={grpo.max_completion_length} "
            f"exceed the model's context of {context_length} tokens; drop the row or lower max_completion_length"
        )
