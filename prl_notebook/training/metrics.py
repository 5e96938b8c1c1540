"""The trainer's metrics of one optimizer step under TRL's names, accumulated exactly over micro-steps.

Sums and extremes are kept, never means of means, so the numbers do not depend on how the period was split. Metrics of
rewards and completion lengths need no model and are in engine/metrics.py.

Shapes: T response tokens of one forward pass, S completions of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from prl_notebook.training.losses import LossInputs, TokenLoss, sampler_ratio

Numbers = dict[str, float]


@dataclass
class UpdateMetrics:
    """Running totals of one optimizer step, or of a part of it."""

    sequence_level: bool
    """clip ratios count completions instead of tokens (importance_sampling_level='sequence')"""
    cispo: bool
    tokens: int = 0
    """completion tokens that enter the loss"""
    loss_sum: float = 0.0
    """before the normaliser"""
    sums: Numbers = field(default_factory=dict)
    lows: Numbers = field(default_factory=dict)
    highs: Numbers = field(default_factory=dict)

    def add(self, x: LossInputs, result: TokenLoss, entropy_T: torch.Tensor, loss_sum: float) -> Numbers:
        """Count one pass in; returns what a live display shows of all passes so far (see `display`)."""
        self.loss_sum += loss_sum
        self._add_clipping(x, result)
        tokens = int(x.mask_T.sum().item())
        if not tokens:
            return self.display()
        self.tokens += tokens

        def kept(x_T: torch.Tensor) -> torch.Tensor:
            return x_T.detach()[x.mask_T].double()

        mismatch = kept(x.old_T - x.sampler_T).nan_to_num(nan=0.0).abs()
        sampler = kept(sampler_ratio(x))
        sums = {"entropy": kept(entropy_T).sum(), "mismatch": mismatch.sum(), "sampler_ratio": sampler.sum()}
        if result.kl_T is not None:
            sums["kl"] = kept(result.kl_T).sum()
        highs = {"mismatch": mismatch.max(), "sampler_ratio": sampler.max(), "ratio": kept(result.ratio_T).max()}
        self._merge(_numbers(sums), _numbers({"sampler_ratio": sampler.min()}), _numbers(highs))
        return self.display()

    def display(self) -> Numbers:
        """ratio_max, entropy_mean, mismatch_max and, with a KL term, kl_mean; empty before the first counted token."""
        if not self.tokens:
            return {}
        shown = {
            "ratio_max": self.highs["ratio"],
            "entropy_mean": self.sums["entropy"] / self.tokens,
            "mismatch_max": self.highs["mismatch"],
        }
        return shown | ({"kl_mean": self.sums["kl"] / self.tokens} if "kl" in self.sums else {})

    def merge(self, other: UpdateMetrics) -> None:
        """Add the totals of another micro-step or data-parallel replica."""
        self.tokens += other.tokens
        self.loss_sum += other.loss_sum
        self._merge(other.sums, other.lows, other.highs)

    def result(self, denominator: float) -> Numbers:
        """The step's metrics. A mean over no token is 0, so that a fully masked period stays finite.

        `sampling/importance_sampling_ratio/*` are the ratios before truncation: a mismatch above the cap must be seen.
        """
        tokens = max(self.tokens, 1)
        mean = {name: total / tokens for name, total in self.sums.items()}
        counted = max(self.sums.get("sequences", 0.0), 1.0) if self.sequence_level else tokens
        high = self.sums.get("clip_high", 0.0) / counted
        low = self.sums.get("clip_low", 0.0) / counted
        metrics = {
            "loss": self.loss_sum / denominator,
            "entropy": mean.get("entropy", 0.0),
            "sampling/sampling_logp_difference/mean": mean.get("mismatch", 0.0),
            "sampling/sampling_logp_difference/max": self.highs.get("mismatch", 0.0),
            "sampling/importance_sampling_ratio/min": self.lows.get("sampler_ratio", 1.0),
            "sampling/importance_sampling_ratio/mean": mean.get("sampler_ratio", 1.0),
            "sampling/importance_sampling_ratio/max": self.highs.get("sampler_ratio", 1.0),
        }
        if "kl" in mean:
            metrics["kl"] = mean["kl"]
        if self.cispo:
            return metrics | {"cispo_clip_ratio": high}
        return metrics | {
            "clip_ratio/low_mean": low,
            "clip_ratio/low_min": self.lows.get("clip_low", 0.0),
            "clip_ratio/high_mean": high,
            "clip_ratio/high_max": self.highs.get("clip_high", 0.0),
            "clip_ratio/region_mean": low + high,
        }

    def _add_clipping(self, x: LossInputs, result: TokenLoss) -> None:
        """Totals of clipped tokens (of completions at sequence level) and the extreme shares of a completion."""
        tokens_S = x.tokens_S
        low_S, high_S = (
            x.sequence_sum(flag_T.to(tokens_S.dtype)) for flag_T in (result.low_clipped_T, result.high_clipped_T)
        )
        low_share_S, high_share_S = low_S / tokens_S.clamp(min=1.0), high_S / tokens_S.clamp(min=1.0)
        if self.sequence_level:
            # All counted tokens of a completion carry its flag, so a share is that flag; TRL counts masked ones too.
            sums = {
                "clip_low": low_share_S.sum(),
                "clip_high": high_share_S.sum(),
                "sequences": tokens_S.new_tensor(len(tokens_S)),
            }
        else:
            sums = {"clip_low": low_S.sum(), "clip_high": high_S.sum()}
        self._merge(_numbers(sums), {}, {})
        if (counted_S := tokens_S > 0).any():
            lows = {"clip_low": low_share_S[counted_S].min()}
            self._merge({}, _numbers(lows), _numbers({"clip_high": high_share_S[counted_S].max()}))

    def _merge(self, sums: Numbers, lows: Numbers, highs: Numbers) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in lows.items():
            self.lows[name] = min(self.lows.get(name, math.inf), value)
        for name, value in highs.items():
            self.highs[name] = max(self.highs.get(name, -math.inf), value)


def _numbers(tensors: dict[str, torch.Tensor]) -> Numbers:
    """Fetch all values from the device at once."""
    return dict(zip(tensors, torch.stack([t.double() for t in tensors.values()]).tolist(), strict=True))
