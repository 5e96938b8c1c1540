"""Random models for the tests of vLLM workers, a worker in a process of its own, and the trainer's log-probs."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from prl_notebook.config import GRPO, Config, Rollout, Run
from prl_notebook.engine.types import Group, GroupRequest, Sampling, WeightsRef
from prl_notebook.rollout.sampling import warp
from prl_notebook.rollout.vllm_setup import worker_environment
from prl_notebook.rollout.worker import GroupDone, RowsDone, WorkerEvent
from prl_notebook.runtime.local import LocalRuntime, Remote
from prl_notebook.tasks.make_tiny import build_tokenizer
from prl_notebook.weights import named_weights, publish

END_IDS = (1, 2)
K = 4
CONFIG = Config(
    grpo=GRPO(num_generations=K, max_completion_length=32),
    rollout=Rollout(engine="vllm", groups_in_flight=8),
    run=Run(devices="cpu"),
)


def make_model(folder: Path, tied: bool) -> PreTrainedModel:
    """A small Qwen3 with two tokens that end a completion, saved to `folder` with the bundled model's tokenizer."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=list(END_IDS),
        pad_token_id=0,
        initializer_range=0.12,  # logits of some size, so that samples and mistakes show
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = list(END_IDS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def change(model: PreTrainedModel, size: float = 1e-3) -> None:
    """What an optimizer step does: every weight moves."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def request(group: int, version: int, prompt_length: int = 10, **sampling: Any) -> GroupRequest:
    """A random prompt and random seeds, both given by `group`."""
    draw = np.random.default_rng(group)
    prompt = tuple(int(i) for i in draw.integers(3, 100, prompt_length))
    seeds = tuple(int(i) for i in draw.integers(0, 2**63 - 1, K))
    return GroupRequest(0, group, version, prompt, seeds, Sampling(**{"max_completion_length": 32} | sampling))


def trainer_logprobs(model: PreTrainedModel, group: Group, sampling: Sampling) -> list[np.ndarray]:
    """float32 [R] per completion: one plain forward of prompt and completion in transformers."""
    scored = []
    for completion in group.completions:
        ids = torch.tensor([*group.prompt_ids, *completion.ids_R])
        with torch.no_grad():
            logits_RV = model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1]
        logprobs_RV = warp(logits_RV, sampling).log_softmax(-1)
        scored.append(logprobs_RV.gather(1, torch.from_numpy(completion.ids_R).long()[:, None])[:, 0].numpy())
    return scored


class WorkerProcess:
    """A rollout worker in a background process, driven as the engine drives it."""

    def __init__(
        self, runtime: LocalRuntime, name: str, target: str, environment: dict[str, str], **kwargs: Any
    ) -> None:
        self.events: queue.SimpleQueue[WorkerEvent | Exception] = queue.SimpleQueue()
        self.remote: Remote = runtime.start(
            name, target, kwargs, environment=environment, on_event=self.events.put, on_death=self.events.put
        )
        self.progress: list[RowsDone] = []

    def load(self, model: PreTrainedModel, version: int, directory: Path) -> WeightsRef:
        """Publish the model and load it; returns what was published."""
        ref = publish(named_weights(model), version, directory)
        acknowledged = self.remote.call("load", ref, timeout=60)
        assert (acknowledged.version, acknowledged.checksum) == (version, ref.checksum)
        return ref

    def run(self, requests: Sequence[GroupRequest], at_once: bool = True) -> dict[int, Group]:
        """Submit all requests, together or each when the one before is done; returns finished groups."""
        done: dict[int, Group] = {}
        for index, one in enumerate(requests):
            self.remote.call("submit", one, timeout=60)
            while len(done) < (len(requests) if index == len(requests) - 1 else 0 if at_once else index + 1):
                event = self.next_event()
                if isinstance(event, GroupDone):
                    done[event.group.group] = event.group
                else:
                    self.progress.append(event)
        return done

    def next_event(self) -> WorkerEvent:
        event = self.events.get(timeout=60)
        if isinstance(event, Exception):
            raise event
        return event


def vllm_process(runtime: LocalRuntime, name: str, folder: Path, config: Config = CONFIG) -> WorkerProcess:
    target = "prl_notebook.rollout.vllm_worker:VllmWorker"
    return WorkerProcess(runtime, name, target, worker_environment(config), model_path=str(folder), config=config)


def assert_same(ones: dict[int, Group], others: dict[int, Group]) -> None:
    """Tokens and log-probs of all groups agree bit for bit."""
    assert ones.keys() == others.keys()
    for key, one in ones.items():
        for a, b in zip(one.completions, others[key].completions, strict=True):
            np.testing.assert_array_equal(a.ids_R, b.ids_R)
            np.testing.assert_array_equal(a.logprobs_R, b.logprobs_R)


def seconds_to_close(runtime: LocalRuntime) -> float:
    start = time.monotonic()
    runtime.close()
    return time.monotonic() - start
