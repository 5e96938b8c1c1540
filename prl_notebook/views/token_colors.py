"""A completion token by token, coloured by one of its numbers, and the K completions of a group side by side.

R = tokens of the completion.
"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any, Literal, get_args

import numpy as np

from prl_notebook.engine.records import CompletionRecord, GroupRecord
from prl_notebook.views.base import View, number, plural, render

Color = Literal["advantage", "loss", "ratio", "kl", "entropy", "policy", "old", "reference", "sampler"]

MEANING: dict[str, str] = {
    "advantage": "advantage of the completion (0 where the token is masked)",
    "loss": "share of the loss (its term of the sum, before the period's normaliser)",
    "ratio": "importance ratio policy / old, as its distance from 1",
    "kl": "KL to the reference model",
    "entropy": "entropy of the policy's next-token distribution",
    "policy": "log-prob under the policy",
    "old": "log-prob under the old policy",
    "reference": "log-prob under the reference model",
    "sampler": "log-prob under the rollout engine that sampled it",
}
SHOWN_EXTREMES = 5
VISIBLE = str.maketrans({"\n": "↵\n", "\t": "⇥\t", "\r": "␍"})


def tokens(record: GroupRecord, completion: int = 0, color: Color = "advantage", loss_type: str | None = None) -> View:
    """Completion number `completion` of a group, each token tinted by `color`; pointing at one gives all its numbers.

    Args:
        loss_type: named beside the loss shares, since they depend on it.

    Raises:
        ValueError: for an unknown colour or one that was not recorded (reference and KL need beta > 0).
        IndexError: when the group has no such completion.
    """
    if not 0 <= completion < len(record.completions):
        raise IndexError(
            f"completion={completion}: group {record.group} has {len(record.completions)} completions, counted from 0"
        )
    c = record.completions[completion]
    values = _values(c, color)
    strength_R = _strength(values)
    cells = []
    for i, text in enumerate(c.tokens):
        masked = c.mask is not None and not c.mask[i]
        sign = "pos" if values[i] > 0 else "neg"
        cells.append(
            (
                text.translate(VISIBLE),
                f"token {'masked' if masked else sign}",
                round(100 * float(strength_R[i])),
                _tip(c, i, masked),
            )
        )
    differ = len(values) > 0 and np.nanmax(values) > np.nanmin(values)
    order = np.argsort(-np.abs(np.nan_to_num(values)))[:SHOWN_EXTREMES] if differ else ()
    extremes = [
        (int(i), c.tokens[i].translate(VISIBLE).strip("\n"), number(float(values[i]))) for i in order if values[i]
    ]
    meaning = MEANING[color] + (f" under loss_type={loss_type!r}" if color == "loss" and loss_type else "")
    masked_count = 0 if c.mask is None else int((~c.mask).sum())
    body = render(
        "tokens",
        record=record,
        c=c,
        completion=completion,
        cells=cells,
        meaning=meaning,
        low=number(float(np.nanmin(values))) if len(values) else "–",
        high=number(float(np.nanmax(values))) if len(values) else "–",
        extremes=extremes,
        masked=plural(masked_count, "token") if masked_count else "",
        prompt=[t.translate(VISIBLE) for t in record.prompt_tokens],
        cut=c.finish_reason == "length",
    )
    lines = [
        f"Period {record.period}, group {record.group}, completion {completion}: {plural(len(c.tokens), 'token')}, "
        f"{c.finish_reason}, reward {number(c.reward)}, advantage {number(c.advantage)}",
        f"prompt:     {record.prompt}",
        f"completion: {c.text}",
    ]
    if extremes:
        lines.append(f"largest {color}: " + ", ".join(f"{text!r} {value}" for _, text, value in extremes))
    return View(body, "\n".join(lines))


def _values(c: CompletionRecord, color: str) -> np.ndarray:
    """float [R] that a colour stands for."""
    if color not in get_args(Color):
        raise ValueError(f"color={color!r} is not one of {', '.join(get_args(Color))}")
    if color == "advantage":
        return np.where(True if c.mask is None else c.mask, c.advantage, 0.0) * np.ones(len(c.tokens))
    if color not in c.numbers:
        recorded = ", ".join(["advantage", *c.numbers])
        why = " (no reference model is loaded with beta=0)" if color in ("reference", "kl") else ""
        raise ValueError(f"color={color!r} was not recorded for this completion{why}; recorded are {recorded}")
    values = np.asarray(c.numbers[color], float)
    return values - 1 if color == "ratio" else values


def _strength(values: np.ndarray) -> np.ndarray:
    """Tint 0..1 of each token: its size relative to the largest one."""
    size = np.abs(np.nan_to_num(values))
    top = size.max(initial=0.0)
    return size / top if top > 0 else np.zeros_like(size)


def _tip(c: CompletionRecord, i: int, masked: bool) -> str:
    parts = [f"token {i} {c.tokens[i]!r} id {c.ids[i]}", f"advantage {number(c.advantage)}"]
    parts += [f"{name} {number(float(values[i]))}" for name, values in c.numbers.items()]
    if masked:
        parts.append("masked: not in the loss")
    return " · ".join(parts)


def group(record: GroupRecord) -> View:
    """The K completions of a prompt side by side: rewards, their mean and std, advantages, finish reasons."""
    rewards = [c.reward for c in record.completions if c.reward is not None]
    mean = fmean(rewards) if rewards else None
    std = stdev(rewards) if len(rewards) > 1 else None
    cards = [_card(i, c) for i, c in enumerate(record.completions)]
    facts = [
        f"reward mean {number(mean)}, std {number(std)} over {plural(len(rewards), 'valid reward')}",
        f"policy version {record.version}, rollout-{record.worker}"
        + ("" if record.micro_step is None else f", trained in micro-step {record.micro_step}"),
    ]
    warning = ""
    if std == 0:
        warning = "All rewards are equal: every advantage is 0 and the group gives no policy gradient."
    elif all(c.finish_reason == "length" for c in record.completions):
        warning = "Every completion was cut at the length limit."
    body = render("group", record=record, cards=cards, facts=facts, warning=warning)
    lines = [f"Period {record.period}, group {record.group}: {'; '.join(facts)}", f"prompt: {record.prompt}"]
    lines += [warning] if warning else []
    lines += [
        f"  [{card['index']}] reward {card['reward']}, advantage {card['advantage']}, "
        f"{card['finish']}, {card['length']}: {card['text']!r}"
        for card in cards
    ]
    return View(body, "\n".join(lines))


def _card(index: int, c: CompletionRecord) -> dict[str, Any]:
    return {
        "index": index,
        "sign": "pos" if c.advantage > 0 else "neg" if c.advantage < 0 else "",
        "reward": number(c.reward),
        "advantage": f"{'+' if c.advantage > 0 else ''}{number(c.advantage)}",
        "by_function": [
            (name, "abstained" if value is None else number(value)) for name, value in c.by_function.items()
        ],
        "extras": list(c.extras.items()),
        "finish": {"stop": "finished", "length": "cut at the length limit"}.get(c.finish_reason, c.finish_reason),
        "length": plural(len(c.ids), "token"),
        "text": c.text,
    }
