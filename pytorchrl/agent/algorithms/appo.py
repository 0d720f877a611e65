"""Asynchronous PPO and its variant with a slow policy, IMPACT (Luo et al. 2020). B = samples of a batch."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms.base import copy_tensors
from pytorchrl.agent.algorithms.ppo import PPO
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.vtrace import VTraceAlgorithm
from pytorchrl.agent.data import Batch, Evaluated, LossParameters, Obs
from pytorchrl.agent.options import option
from pytorchrl.agent.storages import VTraceBuffer
from pytorchrl.agent.transfers import cpu_copy, on_device
from pytorchrl.errors import Problem, WeightsError
from pytorchrl.support.untyped import StateDict


@algorithm("appo", storage=VTraceBuffer)
class APPO(VTraceAlgorithm, PPO):
    """PPO's loss with the advantages A and targets v of a `VTraceBuffer`, plus kl_coef * KL.

    The ratio is pi / mu, where pi is the current policy, and mu is the policy that collected the data. KL is the
    divergence KL(mu || pi), estimated from samples of mu.

    With `target_network`, the target policy of V-trace is the slow policy, a copy of pi that is refreshed every
    `target_update_interval` updates. The ratio is then clip(mu / slow, 0, is_clip) * pi / mu, and KL is
    KL(slow || pi), computed exactly.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(PPO.Options):
        """Options of `APPO`."""

        kl_coef: float = option(
            0.0, help="Initial weight of the KL term, which is then adapted to kl_target; 0 omits the term.", low=0.0)
        kl_target: float = option(
            0.01, low=0.0, exclusive=True,
            help="Target of the KL divergence: kl_coef is multiplied by 1.5 if the divergence is above twice the "
                 "target, and by 0.5 if the divergence is below half the target.")
        target_network: bool = option(False, help="Use a slow policy for V-trace and the ratio (IMPACT).")
        target_update_interval: int = option(
            2, help="Number of updates after which the current policy is copied to the slow policy.", low=1)
        is_clip: float = option(
            2.0, help="Largest importance weight of a sample: the probability of its action under the policy that "
                      "collected it, divided by that under the slow policy.", low=0.0, exclusive=True)

        def contradictions(self) -> Iterator[Problem]:
            """Yield contradictions, and options without an effect."""
            yield from super().contradictions()
            if not self.kl_coef:
                yield from self._without_effect(
                    ("kl_target",), "kl_coef > 0, because otherwise there is no KL term", "kl_coef")
            if not self.target_network:
                yield from self._without_effect(
                    ("target_update_interval", "is_clip"), "target_network=True", "target_network")
            for wrong, text, names in (
                (self.intrinsic_reward is not None,
                 f"intrinsic_reward={self.intrinsic_reward!r} needs rollouts of the newest policy; use PPO",
                 ("intrinsic_reward",)),
                (self.target_network and self.is_compiled,
                 "compile=True does not support the slow policy of target_network=True; leave one of the two out",
                 ("compile", "target_network")),
                (self.target_network and self.kl_coef and self.target_update_interval == 1,
                 f"kl_coef={self.kl_coef} needs target_update_interval >= 2, because a slow policy that is copied at "
                 "every update is always the current one", ("kl_coef", "target_update_interval")),
            ):
                if wrong:
                    yield Problem(text, options=names)

    def __init__(self, options: APPO.Options, *, actor: OnPolicyActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self.kl_coef: float = options.kl_coef
        self._interval: int = options.target_update_interval if options.target_network else 1
        self._num_updates = 0
        self._slow: OnPolicyActor | None = None
        if options.target_network:
            self._slow = copy.deepcopy(self.actor).requires_grad_(False)

    # Learning

    @override
    def terms(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the terms of the loss.

        If the option `kl_coef` is not 0, `kl` is a term of the loss. Otherwise, `kl` is only reported as a measure.
        """
        slow_kl = None
        if self._slow is not None:
            with torch.no_grad(), self._precision():
                slow_logp, _, slow_params, _ = self._slow.evaluate_actions(
                    batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
            slow_kl = self.actor.distribution.kl(slow_params, evaluated.dist_params, batch.mask)
            # PPO's ratio becomes pi / exp(reference) = clip(mu / slow, 0, is_clip) * pi / mu, where mu is the policy
            # that collected the batch, and slow is the slow policy.
            reference = torch.maximum(slow_logp, batch.logp - math.log(self.options.is_clip))
            batch = dataclasses.replace(batch, logp=reference)
        terms, measures = super().terms(evaluated, batch, parameters)
        if not self.options.kl_coef:
            return terms, measures if slow_kl is None else {**measures, "kl": slow_kl.detach()}
        del measures["kl"]
        if slow_kl is None:  # compute PPO's measure `kl` again, this time with its gradient
            log_ratio = evaluated.logp - batch.logp
            if batch.valid is not None:
                log_ratio = torch.where(batch.valid, log_ratio, 0.0)
            slow_kl = log_ratio.exp() - 1.0 - log_ratio
        return {**terms, "kl": slow_kl}, measures

    @override
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        """Return the weights of the terms.

        The weight of `kl` is not read from `parameters`. It is `self.kl_coef`, which `apply_gradients` adapts.
        """
        weights = super().loss_weights(parameters)
        return {**weights, "kl": self.kl_coef} if self.options.kl_coef else weights

    @override
    def evaluate_target(
        self, obs: Obs, rhs: Obs, done: Tensor, action: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the target policy, which is the slow policy if there is one."""
        if self._slow is None:
            return super().evaluate_target(obs, rhs, done, action, mask)
        logp = self._slow.evaluate_actions(obs, rhs, done, action, mask)[0]
        return logp, self.actor.get_value(obs, rhs, done)[0]["value"]

    @override
    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """Compute the gradient.

        If `kl_coef` is not 0, the last of the returned vectors contains the mean KL. Workers average it together with
        the gradients.
        """
        gradients, info = super().compute_gradients(batch)
        if self.options.kl_coef:
            norms, kl = self.norms_of(gradients), info["kl"]
            self._gradients = gradients = [*gradients, on_device(torch.tensor([kl]), self.device)]
            self._keep_norms(gradients, [*norms, abs(kl)])
        return gradients, info

    @property
    @override
    def gradient_sizes(self) -> list[int]:
        """Number of scalars in each vector of gradients.

        If `kl_coef` is not 0, the last vector contains one scalar, the mean KL.
        """
        return [*super().gradient_sizes, 1] if self.options.kl_coef else super().gradient_sizes

    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Update the weights, and then adapt `kl_coef` and refresh the slow policy.

        With a slow policy, `kl_coef` is adapted only when the slow policy is refreshed, which happens every
        `target_update_interval` updates.

        Returns:
            The values that `Algorithm.apply_gradients` returns; if the option `kl_coef` is not 0, also the `kl_coef` of
            the next update.
        """
        gradients = self.last_gradients() if gradients is None else gradients
        info = super().apply_gradients(gradients[:len(self.groups)])
        self._num_updates += 1
        is_due = self._num_updates % self._interval == 0
        if self.options.kl_coef:
            if is_due:  # adapt just before the slow policy is refreshed, because KL is largest then
                self._adapt(float(gradients[-1]))
            info["kl_coef"] = self.kl_coef
        if self._slow is not None and is_due:
            self._slow.load_state_dict(self.actor.state_dict())
        return info

    # States

    @override
    def learning_state(self) -> dict[str, Tensor]:
        """Return the weight of the KL term, and the slow policy."""
        slow = {} if self._slow is None else self._slow.state_dict()
        weight = {"kl_coef": torch.tensor(self.kl_coef, dtype=torch.float64)} if self.options.kl_coef else {}
        return {**weight, **{f"slow.{name}": cpu_copy(tensor) for name, tensor in slow.items()}}

    @override
    def load_learning_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        if self.learning_state().keys() != state.keys():
            raise WeightsError("the state is from an algorithm with a different target_network or kl_coef; set these "
                               "options to the same values")
        if self.options.kl_coef:
            self.kl_coef = float(state["kl_coef"])
        if self._slow is not None:
            slow = {f"slow.{name}": tensor for name, tensor in self._slow.state_dict().items()}
            copy_tensors(slow, {name: state[name] for name in slow}, "gradient state")

    def state_dict(self) -> StateDict:
        """Return the state, including the number of updates, which determines when the slow policy is refreshed.

        See `Algorithm`.
        """
        return {**super().state_dict(), "num_updates": self._num_updates}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._num_updates = state["num_updates"]

    # Helpers

    def _adapt(self, kl: float) -> None:
        if kl > 2.0 * self.options.kl_target:
            self.kl_coef *= 1.5
        elif kl < 0.5 * self.options.kl_target:
            self.kl_coef *= 0.5
