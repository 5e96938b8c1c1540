"""The real vLLM in background processes: exactness, seeds, ends, versions, aborts, and nothing left behind."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from small_runs import required
from transformers import PreTrainedModel
from vllm_cases import (
    END_IDS,
    WorkerProcess,
    assert_same,
    change,
    make_model,
    request,
    seconds_to_close,
    trainer_logprobs,
    vllm_process,
)

from prl_notebook.engine.types import Sampling
from prl_notebook.rollout.guard import MismatchError, mismatch_guard
from prl_notebook.runtime.local import LocalRuntime, RemoteError
from prl_notebook.weights import named_weights, publish

pytestmark = pytest.mark.vllm


class Bench:
    """Three workers: two of an untied model, one of a tied one; and the models as the trainer has them."""

    def __init__(self, folder: Path) -> None:
        required(importlib.util.find_spec("vllm") is not None, "vLLM is not installed; see the README's install lines")
        self.directory = folder / "published"
        self.directory.mkdir()
        self.models = {name: make_model(folder / name, name == "tied") for name in ("tied", "untied")}
        self.runtime = LocalRuntime(folder / "logs")
        self.tied = vllm_process(self.runtime, "tied", folder / "tied")
        self.untied = vllm_process(self.runtime, "untied", folder / "untied")
        self.second = vllm_process(self.runtime, "second", folder / "untied")
        self.version = 0

    def update(self, name: str, *workers: WorkerProcess) -> PreTrainedModel:
        """Give the workers the next version."""
        for worker in workers:
            worker.load(self.models[name], self.version + 1, self.directory)
        self.version += 1
        return self.models[name]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    bench = Bench(tmp_path_factory.mktemp("vllm"))
    for worker in (bench.tied, bench.untied, bench.second):
        worker.remote.ready.result(180)
    yield bench
    assert seconds_to_close(bench.runtime) < 5
    assert not [p for p in psutil.Process().children(recursive=True) if p.pid not in before]


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_logprobs_are_the_trainers_before_and_after_five_updates(bench: Bench, name: str) -> None:
    worker = getattr(bench, name)
    for update in range(6):
        model = bench.update(name, worker)
        if update in (0, 5):
            one = request(update, bench.version, prompt_length=70)
            (group,) = worker.run([one]).values()
            assert mismatch_guard(group, trainer_logprobs(model, group, one.sampling)) < 1e-4
        change(model, 1e-2)


def test_a_changed_policy_is_noticed_by_the_guard(bench: Bench) -> None:
    model = bench.update("untied", bench.untied)
    one = request(0, bench.version)
    (group,) = bench.untied.run([one]).values()
    change(model, 1e-2)
    with pytest.raises(MismatchError, match=r"differ from the trainer's by .* 0.0001 is allowed in float32"):
        mismatch_guard(group, trainer_logprobs(model, group, one.sampling))


def test_sampling_is_the_same_alone_batched_and_on_two_workers(bench: Bench) -> None:
    bench.update("untied", bench.untied, bench.second)
    requests = [request(group, bench.version, prompt_length=5 + 17 * group) for group in range(8)]
    together = bench.untied.run(requests)
    assert_same(together, bench.second.run(requests[::-1]))
    assert_same(together, bench.second.run(requests, at_once=False))
    assert_same(together, bench.untied.run(requests[::2]) | bench.second.run(requests[1::2]))


def test_the_prefix_cache_changes_nothing(bench: Bench) -> None:
    bench.update("untied", bench.untied)
    one = request(3, bench.version, prompt_length=100)
    cold = bench.untied.run([one])
    assert_same(cold, bench.untied.run([one]))


def test_every_completion_has_its_own_seed(bench: Bench) -> None:
    bench.update("untied", bench.untied)
    one = request(0, bench.version)
    one = dataclasses.replace(one, seeds=(*one.seeds[:3], one.seeds[0]))
    (group,) = bench.untied.run([one]).values()
    texts = [tuple(completion.ids_R) for completion in group.completions]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


def test_completions_end_at_every_end_token_or_at_the_limit(bench: Bench) -> None:
    bench.update("untied", bench.untied)
    groups = bench.untied.run([request(group, bench.version) for group in range(16)])
    completions = [completion for group in groups.values() for completion in group.completions]
    assert {c.ids_R[-1] for c in completions if c.finish_reason == "stop"} == set(END_IDS)
    for completion in completions:
        assert not set(completion.ids_R[:-1]) & set(END_IDS)
        assert completion.finish_reason == "stop" or len(completion.ids_R) == 32


def test_logprobs_are_those_of_the_sampling_distribution(bench: Bench) -> None:
    model = bench.update("untied", bench.untied)
    for sampling in ({"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 5, "temperature": 1.5, "top_p": 0.9}):
        one = request(1, bench.version, **sampling)
        (group,) = bench.untied.run([one]).values()
        assert mismatch_guard(group, trainer_logprobs(model, group, one.sampling)) < 1e-4


def test_progress_counts_rows_and_tokens(bench: Bench) -> None:
    bench.update("untied", bench.untied)
    bench.untied.progress.clear()
    (group,) = bench.untied.run([request(2, bench.version)]).values()
    assert [event.done for event in bench.untied.progress] == [1, 2, 3, 4]
    assert bench.untied.progress[-1].tokens == sum(group.lengths)
    assert bench.untied.progress[0].tokens >= min(group.lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 999}, "asks for policy version 999, but version"),
        ({"prompt_ids": ()}, "empty prompt"),
        ({"prompt_ids": (5,) * 250}, "exceed the context of 256 tokens"),
        ({"sampling": Sampling(temperature=0.001, max_completion_length=8)}, "vLLM would sample at temperature 0.01"),
    ],
)
def test_groups_that_cannot_be_sampled_as_asked_are_refused(bench: Bench, change: dict, message: str) -> None:
    bench.update("untied", bench.untied)
    with pytest.raises(RemoteError, match=message):
        bench.untied.remote.call("submit", dataclasses.replace(request(0, bench.version), **change), timeout=60)


def test_an_update_in_mid_generation_is_refused_and_abort_makes_room(bench: Bench) -> None:
    model = bench.update("untied", bench.untied)
    long = [request(group, bench.version, max_completion_length=240) for group in range(4)]
    for one in long:
        bench.untied.remote.submit("submit", one)
    refused = bench.untied.remote.submit("load", publish(named_weights(model), bench.version + 1, bench.directory))
    aborted = bench.untied.remote.submit("abort")
    with pytest.raises(RemoteError, match=r"completions are being sampled under version"):
        refused.result(60)
    aborted.result(60)
    while not bench.untied.events.empty():
        bench.untied.next_event()
    bench.update("untied", bench.untied)
    one = request(9, bench.version)
    (group,) = bench.untied.run([one]).values()
    assert group.group == 9
    mismatch_guard(group, trainer_logprobs(model, group, one.sampling))


def test_key_value_blocks_of_the_old_policy_are_not_used(bench: Bench) -> None:
    model = bench.update("untied", bench.untied)
    bench.untied.run([request(0, bench.version, prompt_length=200)])
    change(model, 0.1)
    bench.update("untied", bench.untied)
    one = request(0, bench.version, prompt_length=200)
    (group,) = bench.untied.run([one]).values()
    assert mismatch_guard(group, trainer_logprobs(model, group, one.sampling)) < 1e-4


def test_a_killed_worker_leaves_nothing(bench: Bench) -> None:
    process = psutil.Process(bench.second.remote.pid)
    started = process.children(recursive=True)
    process.kill()
    bench.second.events.get(timeout=10)
    assert not [p for p in started if p.is_running()]


def test_weights_that_are_missing_are_noticed(bench: Bench) -> None:
    """Last: vLLM cannot start another update after one that failed."""
    tensors = named_weights(bench.models["untied"])
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    ref = publish(tensors, bench.version + 1, bench.directory)
    with pytest.raises(RemoteError, match=r"v_proj.weight is not among the \d+ published weights"):
        bench.untied.remote.call("load", ref, timeout=60)
    with pytest.raises(RemoteError, match="but version None is loaded"):
        bench.untied.remote.call("submit", request(0, bench.version), timeout=60)


def test_numbers_of_a_group_are_plain_arrays(bench: Bench) -> None:
    bench.update("tied", bench.tied)
    (group,) = bench.tied.run([request(0, bench.version)]).values()
    for completion in group.completions:
        assert (completion.ids_R.dtype, completion.logprobs_R.dtype) == (np.int32, np.float32)
        assert len(completion.ids_R) == len(completion.logprobs_R)
