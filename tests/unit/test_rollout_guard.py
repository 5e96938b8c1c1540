"""The guard against a sampler that computes with another policy, and the bookkeeping of groups in flight."""

from __future__ import annotations

import numpy as np
import pytest

from prl_notebook.engine.types import Completion, Group, GroupRequest, Sampling
from prl_notebook.rollout.guard import MismatchError, mismatch_guard
from prl_notebook.rollout.in_flight import GroupInFlight, check_request
from prl_notebook.rollout.worker import GroupDone, RowsDone


def completion(*logprobs: float) -> Completion:
    return Completion(np.arange(len(logprobs), dtype=np.int32), np.array(logprobs, np.float32), "stop")


def group() -> Group:
    return Group(3, 5, 7, (1, 2), [completion(-1.0, -2.0), completion(-0.5, -0.25, -3.0)])


def test_the_largest_difference_is_returned_within_the_tolerance() -> None:
    policy = [np.array([-1.0, -2.0]), np.array([-0.5, -0.25 - 5e-5, -3.0])]
    assert mismatch_guard(group(), policy) == pytest.approx(5e-5, rel=1e-3)


def test_a_mismatch_is_raised_with_the_numbers() -> None:
    policy = [np.array([-1.0, -2.0]), np.array([-0.5, -0.25, -3.5])]
    with pytest.raises(MismatchError) as caught:
        mismatch_guard(group(), policy)
    for part in ("period 3, group 5, policy version 7", "0.5 at most and 0.1 on average", "completion 1, token 2"):
        assert part in str(caught.value)
    assert "-3.000000 against -3.500000" in str(caught.value)
    assert mismatch_guard(group(), policy, "bfloat16") == 0.5


def test_what_top_p_and_top_k_add_is_no_mismatch() -> None:
    kept = [np.array([-1.0, -2.0 + np.log(0.9)]), np.array([-0.5, -0.25 + np.log(0.95), -3.0])]
    assert mismatch_guard(group(), kept, top_p=0.9) < 1e-6
    with pytest.raises(MismatchError, match=r"differ from the trainer's by 0\.05"):
        mismatch_guard(group(), kept, top_p=0.95)
    assert mismatch_guard(group(), [x - 1 for x in kept], top_k=5) < 1e-6
    for truncated in ({"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.9, "top_k": 5}):
        with pytest.raises(MismatchError, match=r"differ from the trainer's by 0\.01"):
            mismatch_guard(group(), [np.array([-1.0, -1.99]), kept[1]], **truncated)


def test_nan_is_a_mismatch() -> None:
    with pytest.raises(MismatchError, match="nan"):
        mismatch_guard(group(), [np.array([-1.0, np.nan]), np.array([-0.5, -0.25, -3.0])])


def test_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \[2, 2\], the group's completions have \[2, 3\]"):
        mismatch_guard(group(), [np.zeros(2), np.zeros(2)])


def test_a_group_is_done_when_all_its_completions_are_in_their_order() -> None:
    request = GroupRequest(3, 5, 7, (1, 2), (11, 12), Sampling())
    flight = GroupInFlight(request, tokens=2)
    first, second = completion(-1.0), completion(-2.0)
    assert flight.finish(1, second) == [RowsDone(3, 5, 1, 2)]
    rows, done = flight.finish(0, first)
    assert rows == RowsDone(3, 5, 2, 2)
    assert isinstance(done, GroupDone)
    assert (done.group.key, done.group.version, done.group.completions) == ((3, 5), 7, [first, second])


def test_a_request_must_fit() -> None:
    request = GroupRequest(3, 5, 7, (1, 2), (11, 12), Sampling(max_completion_length=8))
    check_request(request, 7, 10)
    with pytest.raises(ValueError, match="version 7, but version None"):
        check_request(request, None, 10)
    with pytest.raises(ValueError, match="exceed the context of 9 tokens"):
        check_request(request, 7, 9)
