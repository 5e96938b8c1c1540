"""Bookkeeping of a group whose K completions finish one by one; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from prl_notebook.engine.types import Completion, Group, GroupRequest
from prl_notebook.rollout.worker import GroupDone, RowsDone, WorkerEvent


@dataclass
class GroupInFlight:
    """A submitted group and what is finished of it."""

    request: GroupRequest
    tokens: int = 0
    """Tokens sampled so far, those of unfinished completions included where the engine tells."""
    finished: dict[int, Completion] = field(default_factory=dict)
    """By sample."""

    def finish(self, sample: int, completion: Completion) -> list[WorkerEvent]:
        """Take a finished completion; returns what is to be reported now."""
        self.finished[sample] = completion
        request, count = self.request, len(self.request.seeds)
        events: list[WorkerEvent] = [RowsDone(request.period, request.group, len(self.finished), self.tokens)]
        if len(self.finished) == count:
            completions = [self.finished[sample] for sample in range(count)]
            events.append(
                GroupDone(Group(request.period, request.group, request.version, request.prompt_ids, completions))
            )
        return events


def check_fits(request: GroupRequest, version: int | None, context: int | None) -> None:
    """What every worker demands of a group: the loaded version, a prompt, and room for prompt and completion.

    Args:
        context: Most positions of a sequence; None if the model does not say.

    Raises:
        ValueError: naming the period and group.
    """
    name, prompt, limit = group_name(request), len(request.prompt_ids), request.sampling.max_completion_length
    if request.version != version:
        raise ValueError(f"{name} asks for policy version {request.version}, but version {version} is loaded")
    if not prompt:
        raise ValueError(f"{name} has an empty prompt")
    if context is not None and prompt + limit > context:
        raise ValueError(
            f"{name}: a prompt of {prompt} tokens and max_completion_length={limit} exceed the context of {context} "
            "tokens; shorten the prompt or lower max_completion_length"
        )


def group_name(request: GroupRequest) -> str:
    """How messages call a group."""
    return f"period {request.period}, group {request.group}"


def check_request(request: GroupRequest, version: int | None, context: int) -> None:
    """What every vLLM worker demands of a group.

    Raises:
        ValueError: if it does not fit (`check_fits`), or asks for a temperature that vLLM would silently raise.
    """
    check_fits(request, version, context)
    if request.sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"{group_name(request)}: vLLM would sample at temperature {LOWEST_TEMPERATURE} instead of "
            f"{request.sampling.temperature}; choose a higher one"
        )


LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to it, with a log line only."""
