"""From groups to the flat arrays of the loss and back to the per-completion numbers that views show.

Shapes: T response tokens of one forward pass, S completions of it, R tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from prl_notebook.attention.layout import Layout
from prl_notebook.config import GRPO
from prl_notebook.engine.types import Completion, Group
from prl_notebook.training.losses import LossInputs, TokenLoss
from prl_notebook.training.trainer import TokenDetail
from prl_notebook.training.tri_model import TriLogprobs


def loss_inputs(layout: Layout, groups: Mapping[int, Group], logprobs: TriLogprobs, grpo: GRPO) -> LossInputs:
    """Flat inputs of the loss for one pass. `groups` finds a group by its position within the period."""
    completions = [groups[group].completions[completion] for group, completion in layout.sequences]
    counted_S = np.array([_counts(c, grpo) for c in completions], dtype=bool)
    kl_S = np.array([_has_kl(groups[group], grpo) for group, _ in layout.sequences], dtype=bool)
    advantages = {number: np.asarray(group.advantages_K) for number, group in groups.items()}
    advantage_S = np.array([advantages[group][completion] for group, completion in layout.sequences])
    sampler_T = np.concatenate([c.logprobs_R for c in completions])

    policy_T = logprobs.policy_T
    sequence_T = torch.as_tensor(layout.sequence_T, device=policy_T.device)

    def floats(x: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(x, dtype=policy_T.dtype, device=policy_T.device)

    def flags(x_S: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(x_S, device=policy_T.device)[sequence_T]

    return LossInputs(
        policy_T=policy_T,
        old_T=logprobs.old_T,
        reference_T=logprobs.reference_T,
        sampler_T=floats(sampler_T),
        sequence_T=sequence_T,
        mask_T=flags(counted_S),
        kl_mask_T=flags(kl_S),
        advantage_S=floats(advantage_S),
    )


def token_details(
    layout: Layout, x: LossInputs, result: TokenLoss, entropy_T: torch.Tensor, share_T: torch.Tensor
) -> list[TokenDetail]:
    """Per-token numbers of every completion of one pass. `share_T` is each token's term of the loss sum."""
    ends = np.cumsum(layout.lengths)[:-1]

    def per_completion(x_T: torch.Tensor | None) -> list[np.ndarray] | list[None]:
        if x_T is None:
            return [None] * len(layout.sequences)
        values = x_T.detach()
        return np.split((values if values.dtype == torch.bool else values.float()).cpu().numpy(), ends)

    columns = (x.policy_T, x.old_T, x.reference_T, result.ratio_T, result.kl_T, entropy_T, share_T, x.mask_T)
    advantages = x.advantage_S.tolist()
    return [
        TokenDetail(
            group=group,
            completion=completion,
            policy_R=policy_R,
            old_R=old_R,
            reference_R=reference_R,
            ratio_R=ratio_R,
            kl_R=kl_R,
            entropy_R=entropy_R,
            advantage=advantage,
            loss_R=loss_R,
            mask_R=mask_R,
        )
        for (
            group,
            completion,
        ), advantage, policy_R, old_R, reference_R, ratio_R, kl_R, entropy_R, loss_R, mask_R in zip(
            layout.sequences, advantages, *map(per_completion, columns), strict=True
        )
    ]


def _counts(completion: Completion, grpo: GRPO) -> bool:
    return completion.finish_reason == "stop" or not grpo.mask_truncated_completions


def _has_kl(group: Group, grpo: GRPO) -> bool:
    # Advantages of a group whose rewards are all equal are exactly 0 (see advantages.py).
    return not grpo.mask_zero_variance_kl or bool(np.any(group.advantages_K))
