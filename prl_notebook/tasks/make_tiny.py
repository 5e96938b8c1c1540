"""Build the bundled model: `python -m prl_notebook.tasks.make_tiny OUT [--seed N] [--steps N]`.

A Qwen3 model of 0.8M parameters with a character tokenizer is trained first on clean worked answers of the bundled
task, then on sloppy ones, so that it knows how to think but seldom does: sampled at temperature 1 it earns about 0.25.

About 17 minutes on one core. One thread and a fixed number of steps make the result the same bits on every run; the
last line printed is the SHA-256 of the weights. Another torch build, transformers version or CPU family may round or
initialise differently: a shortened form was checked to repeat its bits on one machine with torch 2.13 (CPU build).
The bundled weights were made with the defaults, torch 2.13.0 (CPU build) and transformers 5.19.0.

Tensor shapes: B = examples of a batch, L = padded length, V = vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from prl_notebook.tasks.tiny import (
    few_shot_preamble,
    question,
    running_sum_reward,
    sample_terms,
    tiny_rows,
    worked_answer,
)

VOCABULARY = 128
CONTEXT = 2048
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
VISIBLE_TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

STEPS = 2000
BATCH = 64
MICRO_BATCH = 16
LEARNING_RATE = 2e-3
PREAMBLE_SHARE = 0.1
"""Share of batches with a few-shot system message, so that long prompts work too."""
MAX_PREAMBLE = 640


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; the tags are single tokens that survive skip_special_tokens."""
    tokens = SPECIAL_TOKENS + VISIBLE_TAGS + [chr(code) for code in range(32, 127)] + ["\n"]
    tokens += [f"<|reserved{i}|>" for i in range(VOCABULARY - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in VISIBLE_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token="<|unknown|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(pad_id: int, end_id: int) -> Qwen3ForCausalLM:
    """Freshly initialised from torch's global seed; 820,608 parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        eos_token_id=end_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end_id, pad_token_id=pad_id, do_sample=True)
    return model


def sloppy_answer(terms: list[int], rng: random.Random) -> str:
    """20 % think with slips, 60 % answer directly and mostly wrong, 10 % forget the tag, 10 % stop early."""
    kind = rng.choices(("think", "direct", "untagged", "early"), weights=(2, 6, 1, 1))[0]
    if kind == "direct":
        wrong = rng.random() < 0.6
        total = sum(terms) + (rng.choice((-1, 1)) * rng.randint(1, 9) if wrong else 0)
        return f"<answer>{max(0, total)}</answer>"
    if kind == "early":
        terms = terms[: rng.randint(2, len(terms))]
    steps, total = [], terms[0]
    for term in terms[1:]:
        slip = rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < 0.05 else 0
        result = max(0, total + term + slip)
        steps.append(f"{total}{term:+d}={result}")
        total = result
    thinking = f"<think>{','.join(steps)}</think>"
    return f"{thinking}{total}" if kind == "untagged" else f"{thinking}<answer>{total}</answer>"


def clean_share(progress: float) -> float:
    """Share of clean answers: all until 35 % of the steps, none from 70 % on, linear in between."""
    return min(1.0, max(0.0, 2 - progress / 0.35))


def make_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, clean: float
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of one optimizer step, shortest first so that neighbours need little padding."""
    preamble = few_shot_preamble(rng.randint(16, MAX_PREAMBLE), rng) if rng.random() < PREAMBLE_SHARE else ""
    head = f"<|system|>{preamble}{END}" if preamble else ""
    prompts, completions = [], []
    for _ in range(BATCH // 8 if preamble else BATCH):
        terms = sample_terms(rng)
        prompts.append(f"{head}<|user|>{question(terms)}{END}<|assistant|>")
        completions.append((worked_answer(terms) if rng.random() < clean else sloppy_answer(terms, rng)) + END)
    pairs = zip(tokenizer(prompts)["input_ids"], tokenizer(completions)["input_ids"], strict=True)
    return sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))


def completion_loss(model: Qwen3ForCausalLM, pairs: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Summed negative log-likelihood of the completions' tokens."""
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids_BL = torch.zeros((len(pairs), length), dtype=torch.long)
    labels_BL = torch.full((len(pairs), length), -100)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        ids_BL[row, :end] = torch.tensor(prompt + completion)
        labels_BL[row, len(prompt) : end] = torch.tensor(completion)
    logits_BLV = model(ids_BL).logits  # causal and padded on the right: no real token attends to padding
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), reduction="sum")


def warm_start(seed: int = 0, steps: int = STEPS) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Train from scratch; sets torch's global seed and one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer.pad_token_id, tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        progress = step / steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (1 - progress**2)
        pairs = make_batch(tokenizer, rng, clean_share(progress))
        tokens = sum(len(completion) for _, completion in pairs)
        optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(pairs), MICRO_BATCH):
            part = completion_loss(model, pairs[start : start + MICRO_BATCH]) / tokens
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss:.4f}  clean {clean_share(progress):.2f}", flush=True)
    return model.eval(), tokenizer


def sampled_reward(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: int = 256, greedy: bool = False
) -> float:
    """Mean reward of one completion for each of `prompts` unseen problems, at temperature 1 (or greedily)."""
    rows = tiny_rows(prompts, seed=1_000_003)
    batch: Any = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    out_BL: Any = model.generate(**batch, do_sample=not greedy, max_new_tokens=64)  # type: ignore[misc]
    texts = tokenizer.batch_decode(out_BL[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return sum(running_sum_reward(completions, [row["answer"] for row in rows])) / prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    model, tokenizer = warm_start(args.seed, args.steps)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for greedy in (False, True):
        print(f"{'greedy' if greedy else 'sampled'} reward {sampled_reward(model, tokenizer, greedy=greedy):.3f}")
    print("sha256", hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
