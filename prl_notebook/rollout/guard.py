"""Does the sampler compute with the trainer's policy? One group's log-probs from both sides tell; numpy only.

Right weights, temperature and top-p give differences of rounding size; a stale layer, a stale prefix cache or a
forgotten temperature gives far more. Top-p and top-k raise the log-probs of the tokens they keep, by the logarithm of
the mass kept, which the trainer does not compute: any rise they explain passes. Left out: correcting a mismatch
(importance_sampling_correction does).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prl_notebook.engine.types import Group

TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 0.1, "bfloat16": 0.6}
"""Largest difference that rounding explains, by dtype. Seen with SmolLM2-135M on vLLM 0.32:
5e-5 in float32, 0.05 to 0.36 in bfloat16."""


class MismatchError(RuntimeError):
    """Rollout worker and trainer disagree on the log-probs of the same tokens."""


def mismatch_guard(
    group: Group, policy_logprobs: Sequence[np.ndarray], *dtypes: str, top_p: float = 1.0, top_k: int = 0
) -> float:
    """Compare the log-probs a group was sampled with and those of the trainer's policy of the same version.

    Args:
        group: K completions as a rollout worker reported them.
        policy_logprobs: float [R] for each of the K completions, after temperature, from the policy before its update.
        dtypes: of rollout worker and trainer; the coarser one decides. None given: float32.
        top_p, top_k: what the worker sampled with and `policy_logprobs` leave out.

    Returns:
        The largest absolute difference that top-p and top-k do not explain.

    Raises:
        MismatchError: with the numbers, if it exceeds the tolerance or is not finite.
        ValueError: if the shapes do not fit.
    """
    lengths = [len(policy_R) for policy_R in policy_logprobs]
    if lengths != group.lengths:
        raise ValueError(f"policy_logprobs has lengths {lengths}, the group's completions have {group.lengths}")
    most_risen = np.inf if top_k else -np.log(top_p)
    rises = [
        completion.logprobs_R.astype(np.float64) - np.asarray(policy_R, np.float64)
        for completion, policy_R in zip(group.completions, policy_logprobs, strict=True)
    ]
    differences = [np.abs(rise_R - rise_R.clip(0.0, most_risen)) for rise_R in rises]
    worst = int(np.argmax([difference_R.max(initial=0.0) for difference_R in differences]))
    largest = float(differences[worst].max(initial=0.0))
    dtype = max(dtypes or ("float32",), key=lambda name: TOLERANCE[name])
    if largest <= TOLERANCE[dtype]:
        return largest
    token, completion = int(differences[worst].argmax()), group.completions[worst]
    raise MismatchError(
        f"period {group.period}, group {group.group}, policy version {group.version}: the rollout worker's log-probs "
        f"differ from the trainer's by {largest:.3g} at most and {np.concatenate(differences).mean():.3g} on average; "
        f"{TOLERANCE[dtype]:g} is allowed in {dtype}. Worst: completion {worst}, token {token} "
        f"(id {completion.ids_R[token]}), {completion.logprobs_R[token]:.6f} against "
        f"{float(policy_logprobs[worst][token]):.6f}. The worker does not compute with these weights, or samples from "
        "another distribution than the trainer scores."
    )
