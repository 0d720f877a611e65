"""Find all contradictions of an agent and its scheme before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import torch

from pytorchrl.agent.factories import Agent
from pytorchrl.errors import Problem
from pytorchrl.scheme.agent_parts import agent_problems, agent_warnings, factory_problems
from pytorchrl.scheme.gradients.defaults import default_problems
from pytorchrl.scheme.gradients.placement import Placement
from pytorchrl.scheme.options.settings import STORAGE_KEYWORDS, Settings
from pytorchrl.scheme.rules import rule_problems, rule_warnings


def check(agent: Agent | None, settings: Settings) -> list[Problem]:
    """Return all contradictions, in the order of the levels.

    Values of single options are checked when the options are built. This function finds everything else: parts of the
    agent that do not fit together, contradictions within a level and between levels, settings that contradict the
    agent, and devices and resources that contradict each other. Each contradiction is found in one place.

    Args:
        agent: The factories of the agent; None: they are not known, so only the settings are checked.
        settings: The settings of the scheme. Their values are allowed, but may contradict each other.
    """
    return list(_contradictions(agent, settings))


def _contradictions(agent: Agent | None, settings: Settings) -> Iterator[Problem]:
    broken = [] if agent is None else factory_problems(agent)
    yield from broken
    for field in fields(settings):
        yield from getattr(settings, field.name).contradictions()
    yield from _torch_problems()
    yield from rule_problems(settings)
    yield from Placement(settings.collection, settings.gradients, settings.process.device, settings.on_ray).problems()
    if agent is not None and not broken:
        yield from agent_problems(agent, settings)
        yield from default_problems(settings.collection, agent)


def _torch_problems() -> Iterator[Problem]:
    """Refuse settings of torch, in this process or thread, with which networks cannot be trained."""
    if (dtype := torch.get_default_dtype()) != torch.float32:
        yield Problem(f"the default dtype of torch is {dtype}, but networks are trained in torch.float32",
                      "call torch.set_default_dtype(torch.float32) before")
    if (device := torch.get_default_device()).type != "cpu":
        yield Problem(f"the default device of torch is {str(device)!r}, but workers expect new tensors on the CPU",
                      f"call torch.set_default_device('cpu') before, and give device={str(device)!r}")
    if not torch.is_grad_enabled():
        yield Problem("gradients are disabled here, by torch.no_grad(), torch.inference_mode() or "
                      "torch.set_grad_enabled(False), so nothing can be trained", "train outside of it")


def keyword_problems(keywords: Mapping[str, object]) -> list[Problem]:
    """Return the problems of the keyword arguments of a scheme whose agent is not known."""
    given = dict(keywords)
    runtime = given.pop("runtime", None)
    settings, problems = Settings.from_keywords(
        {name: value for name, value in given.items() if name not in STORAGE_KEYWORDS},
        runtime=runtime)  # type: ignore[arg-type] # `from_keywords` checks it
    problems.add(check(None, settings))
    return problems.found


def warnings_of(agent: Agent, settings: Settings) -> list[str]:
    """Return a warning for each setting that is allowed, but slow or without an effect; call `check` before."""
    return [*rule_warnings(settings), *agent_warnings(agent, settings)]
