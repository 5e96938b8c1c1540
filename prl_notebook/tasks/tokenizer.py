"""Loads a model's tokenizer without torch where that is possible.

A tokenizer.json holds all that a fast tokenizer does, so the generic class serves for it; AutoTokenizer would import
torch and most of transformers first, which takes seconds in every process that only handles text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder."""
    if (Path(folder) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
