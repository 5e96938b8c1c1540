"""Publishing, opening and verifying policy versions."""

import os
from pathlib import Path

import pytest
import torch
from rollout_models import build
from safetensors.torch import load_file

from prl_notebook.engine.types import WeightsRef
from prl_notebook.runtime import shared_memory
from prl_notebook.runtime.shared_memory import release, session_directory
from prl_notebook.weights import (
    WeightsMismatch,
    checksum,
    load_weights,
    named_weights,
    open_version,
    publish,
)


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt2"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model, other = build(name, seed=0), build(name, seed=1)
    ref = publish(named_weights(model), 12, tmp_path)
    assert ref.path == str(tmp_path / "v000012.safetensors")
    assert os.listdir(tmp_path) == ["v000012.safetensors"]
    assert ref.nbytes == sum(t.nbytes for t in load_file(ref.path).values())
    assert checksum(named_weights(other)) != ref.checksum
    load_weights(other, open_version(ref))
    assert checksum(named_weights(other)) == ref.checksum
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
    release(ref)
    release(ref)
    assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_version(ref)


def test_tied_head_is_published_once_and_stays_tied() -> None:
    tied, untied = build("llama_tied"), build("qwen3")
    assert "lm_head.weight" not in named_weights(tied)
    assert "lm_head.weight" in named_weights(untied)
    load_weights(tied, {name: t + 1 for name, t in named_weights(tied).items()})
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_published_weights_do_not_follow_the_model(tmp_path: Path) -> None:
    model = build("qwen3")
    ref = publish(named_weights(model), 0, tmp_path)
    with torch.no_grad():
        model.lm_head.weight += 1
    assert checksum(open_version(ref)) == ref.checksum != checksum(named_weights(model))


def test_checksum_sees_names_dtypes_shapes_and_bits() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    digest = checksum(weights)
    assert checksum(dict(reversed(weights.items()))) == digest
    assert checksum({**weights, "a": torch.zeros(2, 3).T.contiguous().T}) == digest  # memory layout does not count
    one_bit = torch.zeros(2, 3)
    one_bit[1, 2] = -0.0
    changed = [
        {"a": torch.zeros(3, 2), "b": torch.ones(4)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(4)},
        {"a": torch.zeros(2, 3), "c": torch.ones(4)},
        {"a": one_bit, "b": torch.ones(4)},
    ]
    assert len({digest, *map(checksum, changed)}) == 5
    assert checksum({"scalar": torch.tensor(1.0), "half": torch.ones(3, dtype=torch.bfloat16)})


def test_wrong_version_or_checksum_names_both(tmp_path: Path) -> None:
    ref = publish({"a": torch.zeros(3)}, 4, tmp_path)
    with pytest.raises(WeightsMismatch, match=r"version 5 was asked for, but .*v000004.safetensors holds version 4"):
        open_version(WeightsRef(5, ref.path, ref.checksum, ref.nbytes))
    with pytest.raises(WeightsMismatch, match=f"should have checksum 0123, but .* was published with {ref.checksum}"):
        open_version(WeightsRef(4, ref.path, "0123", ref.nbytes))


def test_weights_that_do_not_fit_leave_the_model_alone() -> None:
    model = build("qwen3")
    before = checksum(named_weights(model))
    good = {name: t + 1 for name, t in named_weights(model).items()}
    missing = {name: t for name, t in good.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsMismatch, match=r"'model.norm.weight' is missing from the published weights"):
        load_weights(model, missing)
    with pytest.raises(WeightsMismatch, match="'extra' is unknown to the model"):
        load_weights(model, {**good, "extra": torch.zeros(1)})
    with pytest.raises(WeightsMismatch, match=r"lm_head.weight is published as torch.bfloat16"):
        load_weights(model, {**good, "lm_head.weight": good["lm_head.weight"].bfloat16()})
    with pytest.raises(WeightsMismatch, match=r"lm_head.weight is published as torch.float32 \(1, 32\)"):
        load_weights(model, {**good, "lm_head.weight": good["lm_head.weight"][:1]})
    assert checksum(named_weights(model)) == before


def test_publishing_in_the_rollout_dtype(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "steps": torch.arange(2)}
    published = open_version(publish(weights, 0, tmp_path, dtype=torch.bfloat16))
    assert published["a"].dtype == torch.bfloat16
    assert published["steps"].dtype == torch.int64


def test_session_directory_falls_back_to_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", memory)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(temporary))
    assert session_directory("abc") == memory / "prl-abc"
    assert session_directory("abc").stat().st_mode & 0o777 == 0o700
    assert session_directory("abc", nbytes=1 << 60) == temporary / "prl-abc"
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "none")
    assert session_directory("abc") == temporary / "prl-abc"
