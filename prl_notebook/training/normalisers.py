"""How per-token losses become one number: every loss is (1/D) * sum_i w_i sum_t l_it over the period's completions.

| loss_type   | w_i     | D                                                  |
|-------------|---------|----------------------------------------------------|
| grpo        | 1/|o_i| | B * K                                              |
| dr_grpo     | 1       | B * K * max_completion_length                      |
| dapo, cispo | 1       | tokens that count, over the whole period (>= 1)    |

|o_i| counts the completion's tokens that enter the loss (at least 1, so that a masked completion gives 0, not 0/0). w_i
depends on the completion alone and D is applied to the summed gradient once, so the result is the same for every
order and split of the period. D of dapo and cispo is known only when the period is complete.

B * K are the completions asked for: one that is missing, has no reward, or is masked as truncated still counts, as in
TRL, so that a hard prompt does not silently raise the weight of the others. Left out on purpose: denominators that
depend on the micro-batch ('bnpo'), which no order-independent sum can give.
"""

from __future__ import annotations

import torch

from prl_notebook.config import GRPO


def sequence_weights(grpo: GRPO, tokens_S: torch.Tensor) -> torch.Tensor:
    """w_i of each completion, float [S], from the number of its tokens that count."""
    if grpo.loss_type == "grpo":
        return 1.0 / tokens_S.clamp(min=1.0)
    return torch.ones_like(tokens_S)


def denominator(grpo: GRPO, groups: int, tokens: int) -> float:
    """D of a period.

    Args:
        groups: B, the prompts of the period.
        tokens: completion tokens of the whole period that enter the loss; only dapo and cispo need it.
    """
    completions = groups * grpo.num_generations
    if grpo.loss_type == "grpo":
        return float(completions)
    if grpo.loss_type == "dr_grpo":
        return float(completions * grpo.max_completion_length)
    return float(max(tokens, 1))
