"""reproducible=True: a group's tokens and log-probs depend on seeds, prompt and weights alone, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from rollout_models import build, request, sample_groups, start
from transformers import AutoModelForCausalLM, GenerationConfig, MixtralConfig

from prl_notebook.engine.types import Group, GroupRequest
from prl_notebook.rollout.batched_model import BLOCK, BatchedModel
from prl_notebook.rollout.transformers_worker import TransformersWorker
from prl_notebook.rollout.worker import GroupDone
from prl_notebook.weights import named_weights, publish

pytestmark = pytest.mark.strict
RNG = np.random.default_rng(0)
REQUESTS = [
    request(index, tuple(RNG.integers(2, 40, RNG.integers(1, 90)).tolist()), completions=int(RNG.integers(2, 12)),
            length=int(RNG.integers(4, 40)), temperature=[0.7, 1.0, 1.5][index % 3], top_k=[0, 0, 12][index % 3],
            top_p=[1.0, 0.9][index % 2])
    for index in range(12)
]  # fmt: skip


def bits(group: Group) -> list[tuple[bytes, bytes, str]]:
    return [(c.ids_R.tobytes(), c.logprobs_R.tobytes(), c.finish_reason) for c in group.completions]


def one_by_one(worker: TransformersWorker, requests: list[GroupRequest]) -> dict[int, list]:
    return {r.group: bits(sample_groups(worker, r)[r.group]) for r in requests}


def staggered(worker: TransformersWorker, requests: list[GroupRequest], every: int) -> dict[int, list]:
    """Groups join a running batch, one every few steps."""
    waiting, done, steps = list(requests), {}, 0
    while waiting or worker.has_work:
        if waiting and steps % every == 0:
            worker.submit(waiting.pop(0))
        done |= {e.group.group: bits(e.group) for e in worker.step() if isinstance(e, GroupDone)}
        steps += 1
    return done


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt2", "gemma3_hybrid_window"])
def test_tokens_and_logprobs_do_not_depend_on_company(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.generation_config = GenerationConfig(eos_token_id=[1, 4])
    worker = start(model, tmp_path, reproducible=True)
    assert sum(len(r.seeds) for r in REQUESTS) > BLOCK  # several blocks are in use
    alone = one_by_one(worker, REQUESTS)
    together = {key: bits(group) for key, group in sample_groups(worker, *REQUESTS).items()}
    assert together == alone
    assert {key: bits(group) for key, group in sample_groups(worker, *REQUESTS[::-1]).items()} == alone
    assert staggered(worker, REQUESTS, every=3) == alone


def test_another_worker_gives_the_same_bits_also_after_a_load(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    old, new = build("qwen3", seed=0), build("qwen3", seed=1)
    one = start(old, first, reproducible=True)
    other = start(new, second, reproducible=True, max_rows=24)
    before = staggered(one, REQUESTS, every=2)
    ref = publish(named_weights(old), 0, second)
    other.load(ref)
    assert one_by_one(other, REQUESTS) == before
    one.load(publish(named_weights(new), 0, first))
    after = one_by_one(one, REQUESTS)
    other.load(publish(named_weights(new), 0, second))
    assert staggered(other, REQUESTS, every=1) == after
    assert after != before


def test_mixtures_of_experts_are_refused() -> None:
    config = MixtralConfig(
        vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    BatchedModel(model)
    with pytest.raises(
        NotImplementedError, match="reproducible=True: a row of MixtralForCausalLM depends on the other"
    ):
        BatchedModel(model, fixed_shapes=True)
