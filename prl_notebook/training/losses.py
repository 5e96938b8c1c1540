"""Per-token losses of the GRPO family, on flat arrays of response tokens.

A loss knows tokens and the completion each belongs to, not rows, padding or micro-batches, so the same code serves
separate rows, shared prompts and every training engine. What the per-token numbers are divided by is left to
normalisers.py. Formulas and defaults are those of TRL 1.16's GRPOTrainer (loss_type, importance_sampling_level, beta,
use_bias_correction_kl, epsilon, epsilon_high).

Shapes: T response tokens of one forward pass, S completions of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from prl_notebook.config import GRPO

log = logging.getLogger(__name__)


@dataclass
class LossInputs:
    """What the loss needs to know about the T response tokens of one pass. Only `policy_T` carries a gradient."""

    policy_T: torch.Tensor
    old_T: torch.Tensor
    reference_T: torch.Tensor | None
    """None when beta is 0."""
    sampler_T: torch.Tensor
    """log-probs the rollout worker reported; NaN where it reported none"""
    sequence_T: torch.Tensor
    """int64: which of the S completions a token belongs to"""
    mask_T: torch.Tensor
    """bool; False: the token does not enter the loss"""
    kl_mask_T: torch.Tensor
    """bool; False: the token has no KL term"""
    advantage_S: torch.Tensor

    def sequence_sum(self, x_T: torch.Tensor) -> torch.Tensor:
        """Sum over the counted tokens of each completion, [S]."""
        return x_T.new_zeros(len(self.advantage_S)).index_add(0, self.sequence_T, x_T * self.mask_T)

    @property
    def tokens_S(self) -> torch.Tensor:
        """Tokens of each completion that count, as float [S]."""
        return self.sequence_sum(torch.ones_like(self.policy_T.detach()))


@dataclass
class TokenLoss:
    """Per-token results; all but `loss_T` are detached. Masked tokens have ratio 1 and KL 0."""

    loss_T: torch.Tensor
    ratio_T: torch.Tensor
    """importance ratio policy / old at `importance_sampling_level`"""
    kl_T: torch.Tensor | None
    low_clipped_T: torch.Tensor
    """bool: ratio below 1 - epsilon with a negative advantage; never for cispo"""
    high_clipped_T: torch.Tensor
    """bool: ratio above 1 + epsilon_high (cispo: epsilon_high) with a positive advantage"""


def token_losses(x: LossInputs, grpo: GRPO) -> TokenLoss:
    """Loss of every response token, before mask and normaliser.

    'grpo', 'dapo', 'dr_grpo': the clipped surrogate of PPO. 'cispo' (MiniMax-M1): -sg(min(ratio, epsilon_high)) * A *
    log p, where epsilon_high is the cap itself, as in TRL. importance_sampling_level='sequence' replaces the token's
    ratio by the completion's geometric mean (GSPO, Zheng et al. 2025).
    """
    # A masked token may carry any log-prob; with log-ratio 0 it stays finite forward and backward.
    log_ratio_T = torch.where(x.mask_T, x.policy_T - x.old_T, 0.0)
    if grpo.importance_sampling_level == "sequence":
        log_ratio_S = x.sequence_sum(log_ratio_T) / x.tokens_S.clamp(min=1.0)
        log_ratio_T = log_ratio_S[x.sequence_T]
    ratio_T = log_ratio_T.exp()
    advantage_T = x.advantage_S[x.sequence_T]

    high = grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high
    if grpo.loss_type == "cispo":
        policy_T = torch.where(x.mask_T, x.policy_T, 0.0)
        loss_T = -ratio_T.detach().clamp(max=high) * advantage_T * policy_T
        low_clipped_T = torch.zeros_like(x.mask_T)
        high_clipped_T = (ratio_T > high) & (advantage_T > 0)
    else:
        clipped_T = ratio_T.clamp(1 - grpo.epsilon, 1 + high)
        loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
        low_clipped_T = (ratio_T < 1 - grpo.epsilon) & (advantage_T < 0)
        high_clipped_T = (ratio_T > 1 + high) & (advantage_T > 0)

    if grpo.importance_sampling_correction:
        loss_T = loss_T * sampler_ratio(x).clamp(max=grpo.importance_sampling_cap)
    kl_T = None
    if x.reference_T is not None:
        kl_T = kl_term(torch.where(x.mask_T, x.policy_T - x.reference_T, 0.0), ratio_T, grpo)
        loss_T = loss_T + grpo.beta * kl_T * x.kl_mask_T
        kl_T = kl_T.detach()
    return TokenLoss(loss_T, ratio_T.detach(), kl_T, low_clipped_T, high_clipped_T)


def sampler_ratio(x: LossInputs) -> torch.Tensor:
    """Trainer's probability over the sampler's, [T], from the old policy: 1 where both engines agree.

    Tokens that are masked or that the sampler did not score get exactly 1.
    """
    return torch.where(x.mask_T, x.old_T.detach() - x.sampler_T, 0.0).nan_to_num(nan=0.0).exp()


def kl_term(log_ratio_T: torch.Tensor, importance_T: torch.Tensor, grpo: GRPO) -> torch.Tensor:
    """Schulman's estimators of KL(policy || reference), [T], from log_ratio = log policy - log reference.

    k1 = log_ratio, k2 = log_ratio^2 / 2, k3 = exp(-log_ratio) - 1 + log_ratio. As a loss on samples of the policy
    itself k1 has zero expected gradient, k2 the gradient of the reverse KL, k3 that of the forward KL. With
    `use_bias_correction_kl` (TRL's default; DeepSeek-V3.2) the importance ratio multiplies the estimate and all three
    have the gradient of the reverse KL; for k2, whose own gradient is already right, the ratio is a constant factor.

    Args:
        importance_T: policy / old with its gradient.
    """
    if grpo.kl_estimator == "k1":
        kl_T = log_ratio_T
    elif grpo.kl_estimator == "k2":
        kl_T = log_ratio_T.square() / 2
    else:
        kl_T = (-log_ratio_T).exp() - 1 + log_ratio_T
    if not grpo.use_bias_correction_kl:
        return kl_T
    return kl_T * (importance_T.detach() if grpo.kl_estimator == "k2" else importance_T)


def warn_about_kl(grpo: GRPO) -> None:
    """Log a warning if the KL term cannot hold the policy near the reference."""
    corrected = grpo.use_bias_correction_kl and grpo.importance_sampling_level == "token"
    if grpo.beta and grpo.kl_estimator == "k1" and not corrected:
        log.warning(
            "kl_estimator='k1' as a loss has zero expected gradient on the policy's own samples: a larger beta adds "
            "noise and does not lower the KL. Use 'k3' or 'k2', or use_bias_correction_kl=True with token-level ratios."
        )
