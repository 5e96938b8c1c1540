"""Configuration: frozen dataclasses with TRL's names where TRL has one; imports neither torch nor Jupyter.

`GRPO` says what is optimised, `Rollout`, `Trainer`, `Rewards` and `Weights` say with what, `Run` says how it is
scheduled and recorded. One deviation from TRL: its batch size counts completions; here `prompts_per_period` counts
prompts, and the derived number of completions is `GRPO.completions_per_period`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

LossType = Literal["grpo", "dapo", "dr_grpo", "cispo"]

BNPO_REASON = (
    "loss_type='bnpo' averages over the tokens of each micro-batch, so its gradient depends on how groups are packed "
    "and when they arrive; it cannot be accumulated exactly. Use 'dapo': the same token mean over the whole period."
)
BATCH_SCALE_REASON = (
    "scale_rewards='batch' divides by the standard deviation of the whole period's rewards, which is known only after "
    "the last group: groups could not be trained as they arrive. Use 'group' or 'none'."
)


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise ValueError(f"{name}={value} must be at least {low}")


@dataclass(frozen=True)
class GRPO:
    """The algorithm. Defaults are TRL's (GRPOConfig) except `prompts_per_period` and `lr_scheduler_type`."""

    prompts_per_period: int = 16
    """B: prompts per period (one optimizer step with num_iterations=1)."""
    num_generations: int = 8
    """K: completions per prompt."""
    max_prompt_length: int | None = None
    """Longest prompt accepted, in tokens; a longer one is an error, never cut. None: only the model's limit counts."""
    max_completion_length: int = 512
    """Most tokens sampled per completion."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Nucleus sampling; 1.0 turns it off."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 turns it off."""
    loss_type: LossType = "dapo"
    """'grpo' (sequence means), 'dapo' (mean over the period's tokens), 'dr_grpo' (constant), 'cispo' (clipped weights;
    MiniMax-M1)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """'sequence' makes it GSPO."""
    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    """'grpo': (r - mean) / (std + 1e-4); 'rloo': r minus the mean of the other K-1 rewards (Ahmadian et al. 2024)."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide GRPO advantages by the group's standard deviation (ddof=1), or not."""
    beta: float = 0.0
    """Weight of the KL term; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators. As a loss without bias correction k1 has zero expected gradient: a warning says so."""
    epsilon: float = 0.2
    """Lower clip range of the ratio."""
    epsilon_high: float | None = None
    """Upper clip range; None means epsilon. For 'cispo' it caps the weight itself, as in TRL; ScaleRL uses 5."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the importance ratio, so that its gradient is the reverse KL's (TRL's default)."""
    num_iterations: int = 1
    """Optimizer steps per period over the same batch."""
    mask_truncated_completions: bool = False
    """Completions that hit max_completion_length do not enter the loss."""
    mask_zero_variance_kl: bool = False
    """Leave groups whose rewards are all equal out of the KL term too (they have no policy gradient anyway)."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward function; None: all 1."""
    learning_rate: float = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; 'linear' and 'cosine' decay to 0 over `total_periods`. TRL's default is 'linear'; it needs to know
    the end of the run, which a session that is stepped by hand does not have."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_periods: int | None = None
    """Length of the learning-rate schedule in periods; needed by 'linear' and 'cosine'."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Clip the normalised gradient to this L2 norm; 0 turns clipping off."""
    importance_sampling_correction: bool = False
    """Truncated importance sampling: weigh tokens by min(trainer / sampler probability, cap)."""
    importance_sampling_cap: float = 2.0
    shuffle_dataset: bool = True
    """Visit the rows of each epoch in a seeded random order."""
    seed: int = 42
    """The run's seed: data order and every completion's seed derive from it."""

    def __post_init__(self) -> None:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: a group needs at least 2 completions, since the advantage "
                "compares a completion with the others of its prompt"
            )
        if self.loss_type == "bnpo":
            raise ValueError(BNPO_REASON)
        if self.scale_rewards == "batch":
            raise ValueError(BATCH_SCALE_REASON)
        _choice("loss_type", self.loss_type, ("grpo", "dapo", "dr_grpo", "cispo"))
        _choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        _choice("advantage_estimator", self.advantage_estimator, ("grpo", "rloo"))
        _choice("scale_rewards", self.scale_rewards, ("group", "none"))
        _choice("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        _choice("lr_scheduler_type", self.lr_scheduler_type, ("constant", "linear", "cosine"))
        for name in ("prompts_per_period", "max_completion_length", "num_iterations"):
            _at_least(name, getattr(self, name), 1)
        for name in ("beta", "epsilon", "top_k", "warmup_steps", "learning_rate", "weight_decay", "max_grad_norm"):
            _at_least(name, getattr(self, name), 0)
        if self.lr_scheduler_type != "constant" and self.total_periods is None:
            raise ValueError(
                f"lr_scheduler_type={self.lr_scheduler_type!r} decays over total_periods, which is not set; "
                "set it or use 'constant'"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature} must be above 0: greedy completions of a group are all equal"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")

    @property
    def completions_per_period(self) -> int:
        """TRL's batch size: prompts_per_period * num_generations."""
        return self.prompts_per_period * self.num_generations


@dataclass(frozen=True)
class Rollout:
    """Who samples completions."""

    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    workers: int = 1
    """Background processes that sample; a free worker takes the next prompt."""
    groups_in_flight: int = 16
    """Groups a worker samples at once."""
    threads: int | None = None
    """CPU threads per worker; None divides the machine's cores (1 when Run.reproducible)."""
    dtype: str = "float32"
    urls: tuple[str, ...] = ()
    """engine='vllm-server': base URLs of running servers, one worker each."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the engine as they are (for vLLM: EngineArgs)."""

    def __post_init__(self) -> None:
        _choice("Rollout.engine", self.engine, ("transformers", "vllm", "vllm-server"))
        _at_least("Rollout.workers", self.workers, 1)
        _at_least("Rollout.groups_in_flight", self.groups_in_flight, 1)
        if self.engine == "vllm-server" and len(self.urls) != self.workers:
            raise ValueError(f"Rollout.urls must name one server per worker ({self.workers}), got {len(self.urls)}")


@dataclass(frozen=True)
class Trainer:
    """Who trains."""

    engine: Literal["torch", "megatron"] = "torch"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    tokens_per_microstep: int = 4096
    """Token budget of one forward and backward pass; groups that have arrived are packed up to it."""
    shared_prompt: Literal["auto"] | bool = "auto"
    """Compute a prompt once for its K completions: always, never, or when the FLOP count says it pays."""
    old_policy: Literal["auto", "always"] = "auto"
    """'auto' skips the old policy's forward where it equals policy.detach() (the first update of a period)."""
    gradient_checkpointing: bool = False
    threads: int | None = None
    """CPU threads per rank; None divides the machine's cores."""
    dtype: str = "float32"
    """Of the parameters; gradients are accumulated in float32 at least."""

    def __post_init__(self) -> None:
        _choice("Trainer.engine", self.engine, ("torch", "megatron"))
        _choice("Trainer.shared_prompt", self.shared_prompt, ("auto", True, False))
        _choice("Trainer.old_policy", self.old_policy, ("auto", "always"))
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "tokens_per_microstep"):
            _at_least(f"Trainer.{name}", getattr(self, name), 1)
        if self.engine == "torch" and self.ranks != 1:
            raise ValueError("Trainer(engine='torch') is one process; parallel training needs engine='megatron'")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def tokens_at_once(self) -> int:
        """Tokens that the engine hands to the trainer together: a pass for each replica and each of its stages."""
        return self.tokens_per_microstep * self.data_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class Rewards:
    """How reward functions are run: in a process of their own, so that a hanging one can be killed."""

    timeout: float = 60.0
    """Seconds one group's scoring may take before the reward process is killed and started again."""
    on_error: Literal["raise", "invalid"] = "raise"
    """An exception or a time-out ends the run ('raise'), or makes the group's completions invalid: no reward, no
    gradient, counted in the metric rewards/invalid ('invalid')."""
    skip_special_tokens: bool = True
    """Leave special tokens (EOS, ...) out of the completions' text, as TRL does; completion_ids always has them."""

    def __post_init__(self) -> None:
        _choice("Rewards.on_error", self.on_error, ("raise", "invalid"))
        if self.timeout <= 0:
            raise ValueError(f"Rewards.timeout={self.timeout} must be above 0 seconds")


@dataclass(frozen=True)
class Weights:
    """How a policy version travels from the trainer to the rollout workers."""

    transfer: Literal["auto", "shared_memory", "nccl", "hccl"] = "auto"
    """'shared_memory': a file in shared memory, on every kind of device; it also serves workers that are started again.
    'nccl' (CUDA) and 'hccl' (Ascend): broadcast from device to device to vLLM workers on devices of their own, by
    vLLM's and vllm-ascend's own backends; not run on hardware. The group meets on a loopback port, and it cannot
    replace a member: a worker that dies ends the run (Session.resume goes on). 'auto' broadcasts where it can."""

    def __post_init__(self) -> None:
        _choice("Weights.transfer", self.transfer, ("auto", "shared_memory", "nccl", "hccl"))

    @property
    def broadcast(self) -> bool:
        """Whether trainer and rollout workers form a group of their own for it."""
        return self.transfer in ("nccl", "hccl")


@dataclass(frozen=True)
class Run:
    """How a run is scheduled, recorded and guarded."""

    schedule: Literal["periodic", "synchronous"] = "periodic"
    """When the trainer starts: with the first finished group, or when all groups are there."""
    consume: Literal["arrival", "prompt_order"] = "arrival"
    """Order in which groups are trained. 'prompt_order' makes a period's gradient bit-for-bit reproducible."""
    dispatch: Literal["prompt_order", "longest_first"] = "prompt_order"
    """Order in which prompts go out; 'longest_first' sends those expected to take longest first (by their mean
    completion length so far, else prompt length), which shortens the period's tail."""
    reproducible: bool = False
    """A group's tokens depend on seeds and weights alone, not on what else is in flight (slower; see rollout/)."""
    devices: str = "auto"
    """'cpu', 'cuda', 'npu', or with indices such as 'npu:0-7', divided between rollout and trainer."""
    checkpoint_every: int = 10
    """Periods between checkpoints; 0: only when a run ends."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; 0 keeps all."""
    record_tokens: bool = True
    """Keep per-token numbers (log-probs, ratio, KL, entropy, loss) of every completion in the run directory."""
    stall_after: float = 30.0
    """Seconds without progress after which a notice names the groups that are waited for."""
    max_restarts: int = 3
    """Deaths per background process that are repaired by starting it again, per period (see Weights.transfer)."""

    def __post_init__(self) -> None:
        _choice("Run.schedule", self.schedule, ("periodic", "synchronous"))
        _choice("Run.consume", self.consume, ("arrival", "prompt_order"))
        _choice("Run.dispatch", self.dispatch, ("prompt_order", "longest_first"))


@dataclass(frozen=True)
class Config:
    """Everything about a run but model, data and rewards."""

    grpo: GRPO = field(default_factory=GRPO)
    rollout: Rollout = field(default_factory=Rollout)
    trainer: Trainer = field(default_factory=Trainer)
    rewards: Rewards = field(default_factory=Rewards)
    weights: Weights = field(default_factory=Weights)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        if self.weights.broadcast and self.rollout.engine != "vllm":
            raise ValueError(
                f"Weights.transfer={self.weights.transfer!r} needs Rollout(engine='vllm'), whose workers can join the "
                f"trainer's group; with engine={self.rollout.engine!r} use 'auto'"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; `Config.from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        """Build from sections of plain data.

        Raises:
            ValueError: naming the section and field that is unknown.
        """
        sections = {
            "grpo": GRPO,
            "rollout": Rollout,
            "trainer": Trainer,
            "rewards": Rewards,
            "weights": Weights,
            "run": Run,
        }
        if unknown := set(data) - set(sections):
            raise ValueError(f"unknown section {sorted(unknown)[0]!r}; sections are {', '.join(sections)}")
        return cls(**{name: _section(name, sections[name], values) for name, values in data.items()})


def _section(name: str, kind: type, values: dict[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"[{name}] has no field {key!r}; fields are {', '.join(known)}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
