"""Random network distillation (Burda et al. 2019), an intrinsic reward for observations that are new.

T = steps of a rollout, E = environments, B = samples of a batch, F = features, K = outputs of a network.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.extractors import MLP, linear, module_list
from pytorchrl.agent.actors.normalizers import RunningMoments, discounted_sums, moments
from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.actors.trunk import CRITIC_GROUP, Trunk
from pytorchrl.agent.data import Batch, Evaluate, Evaluated, LossParameters, Obs, RolloutData
from pytorchrl.agent.moments import Moments, joint_moments
from pytorchrl.agent.options import Options, option
from pytorchrl.agent.recursion import as_values
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.storages.returns import continuing_gae
from pytorchrl.agent.transfers import on_device
from pytorchrl.errors import ConfigError, Problem

_CLIP = 5.0  # largest absolute value of a normalized observation: Burda et al. 2019, section 2.4
_PREFIX = "rnd/"
_RETURN = f"{_PREFIX}return"


@dataclass(frozen=True, kw_only=True)
class IntrinsicOptions(Options):
    """Options of an intrinsic reward."""

    intrinsic_reward: str | None = option(
        None, help="Reward for exploration: rnd rewards observations that a network does not predict well yet.",
        choices=(None, "rnd"))
    gamma_intrinsic: float = option(0.99, help="Discount of intrinsic rewards.", low=0.0, high=1.0)
    int_adv_coef: float = option(1.0, help="Weight of the advantages of intrinsic rewards.", low=0.0, updatable=True)
    ext_adv_coef: float = option(
        2.0, help="Weight of the advantages of the environment's rewards if there are intrinsic rewards.", low=0.0,
        updatable=True)
    predictor_proportion: float = option(
        1.0, help="Share of the samples, drawn at random, from which the predictor of rnd learns.", low=0.0, high=1.0,
        exclusive=True)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options of intrinsic rewards if there are none."""
        yield from super().contradictions()
        if self.intrinsic_reward is None:
            yield from self._without_effect(
                ("gamma_intrinsic", "int_adv_coef", "ext_adv_coef", "predictor_proportion"),
                "intrinsic_reward='rnd'", "intrinsic_reward")


class RND(nn.Module):
    """Random network distillation: a predictor learns the outputs of a random network, and its error is the reward.

    Let o' be the next observation, m and s the mean and standard deviation of next observations, and
    x = clip((o' - m) / s, -5, 5). The intrinsic reward is mean_k (f_k(x) - g_k(x))^2, where the random network g never
    changes and f learns to predict it. The reward is divided by the standard deviation of its discounted sum, which
    runs on at the ends of episodes. A second value head, over the features of the value head, learns its returns,
    which run on, too.

    Learners compute all this, so collectors receive neither the networks nor the moments. The moments of a train batch
    are merged by all workers in the same order, like those of `Actor.merge_moments`; see `take_moments`.
    """

    def __init__(self, actor: OnPolicyActor, options: IntrinsicOptions) -> None:
        """Build the networks from the seed of `actor`, so that they are the same in all workers.

        Raises:
            ConfigError: The value head of the actor is not a linear layer.
        """
        super().__init__()
        if not isinstance(actor.value_head, nn.Linear):
            raise ConfigError(f"intrinsic_reward={options.intrinsic_reward!r} needs an actor with a linear value_head, "
                              f"got {type(actor.value_head).__name__}; use a linear layer")
        generator = torch_generator(derive_seed(actor.seed, Stream.INIT, 1))
        spaces = actor.options.group(CRITIC_GROUP)
        plain = actor.options.replaced(recurrent_net=None, recurrent_size=None)
        self.target, self.predictor = (
            _Network(Trunk(plain, generator, spaces=spaces), num_layers, generator) for num_layers in (0, 2))
        self.target.requires_grad_(False)
        self.value_head = linear(actor.value_head.in_features, 1, 1.0, generator)
        normalized = [leaf for leaf, space in spaces.items() if isinstance(space, gym.spaces.Box)]
        self._leaves, self._normalized = tuple(spaces), {leaf: place for place, leaf in enumerate(normalized)}
        self.obs_moments = module_list(RunningMoments(tuple(spaces[leaf].shape or ())) for leaf in normalized)
        self.return_moments = RunningMoments(())
        # The moments with those of the train batch in use, which all workers merge only with the first update from it.
        self._current = copy.deepcopy(self.obs_moments)
        self._actor, self._options = [actor], options  # a list, so that the actor is not a submodule
        self._sums, self._found = dict[Hashable, np.ndarray](), dict[str, Moments]()
        self.to(actor.device)
        share = ("predicted",) if options.predictor_proportion < 1.0 else ()
        self.sample_values = ("intrinsic_reward", "intrinsic_ret", *share, *(_PREFIX + leaf for leaf in self._leaves))
        """Names of the entries of `RolloutData.other` that batches contain."""

    # Data

    def prepare(self, rollouts: Sequence[RolloutData], sources: Sequence[Hashable], generator: torch.Generator,
                evaluate: Evaluate) -> None:
        """Add intrinsic rewards and values to new rollouts, as entries of `RolloutData.other`.

        Args:
            rollouts: The rollouts of a train batch; those that were prepared before do not change.
            sources: The collector of each rollout, whose discounted sums go on from rollout to rollout.
            generator: CPU generator that draws the samples from which the predictor learns.
            evaluate: Function that evaluates networks for many rows.
        """
        new = [pair for pair in zip(rollouts, sources, strict=True) if "intrinsic_reward" not in pair[0].other]
        for rollout, _ in new:
            rollout.other.update({_PREFIX + leaf: rollout.next_observations(leaf) for leaf in self._leaves})
        for current, merged in zip(self._current, self.obs_moments, strict=True):
            current.load_state_dict(merged.state_dict())
        if not new:
            return
        found = {_PREFIX + leaf: joint_moments(
            moments(rollout.other[_PREFIX + leaf][rollout.valid]) for rollout, _ in new) for leaf in self._normalized}
        for leaf, place in self._normalized.items():
            self._current[place].merge(found[_PREFIX + leaf])
        rewards = [self._raw_rewards(rollout, evaluate) for rollout, _ in new]
        found[_RETURN] = joint_moments(
            self._sum_moments(reward, *pair) for reward, pair in zip(rewards, new, strict=True))
        returns = copy.deepcopy(self.return_moments)
        returns.merge(found[_RETURN])
        for reward, (rollout, _) in zip(rewards, new, strict=True):
            rollout.other["intrinsic_reward"] = reward * returns.scale.to(reward.device)
            rollout.other["intrinsic_value"] = self._values(rollout, evaluate)
            if (share := self._options.predictor_proportion) < 1.0:
                drawn = torch.rand(reward.shape, generator=generator) < share
                rollout.other["predicted"] = on_device(drawn.float() / share, reward.device)
        self._found = found

    def advantages(self, rollout: RolloutData, extrinsic: np.ndarray | Tensor, gae_lambda: float,
                   parameters: Mapping[str, float], recompute: Evaluate | None) -> np.ndarray | Tensor:
        """Return the weighted sum of extrinsic and intrinsic advantages, (T, E), and store the intrinsic returns.

        Args:
            rollout: A prepared rollout.
            extrinsic: (T, E) advantages of the environment's rewards.
            gae_lambda: Bias-variance trade-off of the advantages.
            parameters: Current values of the algorithm's updatable options.
            recompute: Function that evaluates networks; intrinsic values are computed again. None: they are not.
        """
        value = rollout.other["intrinsic_value"] if recompute is None else self._values(rollout, recompute)
        own, ret = continuing_gae(rollout, rollout.other["intrinsic_reward"], value, self._options.gamma_intrinsic,
                                  gae_lambda)
        rollout.other["intrinsic_ret"] = torch.as_tensor(ret)
        return parameters["ext_adv_coef"] * extrinsic + parameters["int_adv_coef"] * own

    def forget_sums(self) -> None:
        """Forget the discounted sums, because all environments were replaced."""
        self._sums.clear()

    # Moments

    def take_moments(self) -> dict[str, Moments]:
        """Return the moments of the latest new rollouts once; all workers then merge them."""
        found, self._found = self._found, {}
        return found

    def merge_moments(self, found: Mapping[str, Moments]) -> None:
        """Merge moments from `take_moments`; other moments are ignored."""
        if _RETURN in found:
            self.return_moments.merge(found[_RETURN])
            for leaf, place in self._normalized.items():
                self.obs_moments[place].merge(found[_PREFIX + leaf])

    def learning_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are not in a parameter group: the random network and the moments."""
        for part in ("target", "obs_moments", "return_moments"):
            for name, tensor in getattr(self, part).state_dict(keep_vars=True).items():
                yield f"{_PREFIX}{part}.{name}", tensor.data

    # Networks

    def errors(self, obs: Obs) -> Tensor:
        """Return the errors (N,) of the predictor for next observations, leaf -> (N, ...)."""
        x = {**obs, **{leaf: self._current[place].normalize(obs[leaf], _CLIP)
                       for leaf, place in self._normalized.items()}}
        return (self.predictor.forward(x) - self.target.forward(x)).square().mean(-1)

    def terms(self, evaluated: Evaluated, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the losses of the predictor and of the second value head, and the rewards; see `PPO.terms`."""
        assert evaluated.value_features is not None, "evaluate_all() returned no features of the value"
        value = self.value_head(evaluated.value_features).squeeze(-1)
        rows = {leaf: batch.other[_PREFIX + leaf].flatten(0, batch.ret.ndim - 1) for leaf in self._leaves}
        error = self.errors(rows).view_as(batch.ret)
        if "predicted" in batch.other:
            error = error * batch.other["predicted"]
        terms = {"intrinsic_value_loss": 0.5 * (value - batch.other["intrinsic_ret"]).square(),
                 "predictor_loss": error}
        return terms, {"intrinsic_reward": batch.other["intrinsic_reward"]}

    @staticmethod
    def loss_weights(parameters: LossParameters) -> dict[str, float]:
        """Return the weights of the terms; see `PPO.loss_weights`."""
        return {"intrinsic_value_loss": float(parameters["value_loss_coef"]), "predictor_loss": 1.0}

    def example(self, obs: Obs, zeros: Tensor) -> Obs:
        """Return `Batch.other` for observations `obs` and zeros (B,); see `OnPolicyAlgorithm.example_batch`."""
        return {name: obs[name.removeprefix(_PREFIX)] if name.startswith(_PREFIX) else zeros
                for name in self.sample_values}

    def _raw_rewards(self, rollout: RolloutData, evaluate: Evaluate) -> Tensor:
        """Return the intrinsic rewards (T, E) before they are divided, 0 in invalid rows."""
        def errors(obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> Tensor:
            with torch.autocast(done.device.type, enabled=False):  # the errors are small differences
                return self.errors(obs)

        rows = {leaf: rollout.other[_PREFIX + leaf].flatten(0, 1) for leaf in self._leaves}
        found = evaluate(errors, rows, {}, rollout.done[1:].flatten())
        return torch.where(rollout.valid, found.view(rollout.reward.shape), 0.0)

    def _sum_moments(self, reward: Tensor, rollout: RolloutData, source: Hashable) -> Moments:
        """Return the moments of the discounted sums of a collector's rewards, which run on at ends of episodes."""
        no = torch.zeros_like(rollout.terminated)
        running = self._sums.setdefault(source, as_values(reward.new_zeros(rollout.num_envs, dtype=torch.float64)))
        going_on = dataclasses.replace(rollout, reward=reward, terminated=no, truncated=no)
        sums = discounted_sums(going_on, self._options.gamma_intrinsic, running)
        return moments(torch.as_tensor(sums)[rollout.valid])

    def _values(self, rollout: RolloutData, evaluate: Evaluate) -> Tensor:
        """Return the intrinsic values (T + 1, E) of a rollout's observations."""
        def values(obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> Tensor:
            latent, _ = self._actor[0].latent_of_value(obs, rhs, done)
            return self.value_head.forward(latent).squeeze(-1).float()

        rows = [{name: leaf.flatten(0, 1) for name, leaf in part.items()} for part in (rollout.obs, rollout.rhs)]
        return evaluate(values, rows[0], rows[1], rollout.done.flatten(0, 1)).view(rollout.done.shape)


class _Network(nn.Module):
    """A feature extractor with F outputs, `num_layers` layers with ReLU, and a linear layer; K = F."""

    def __init__(self, trunk: Trunk, num_layers: int, generator: torch.Generator) -> None:
        super().__init__()
        size = trunk.out_features
        self.trunk, self.layers = trunk, MLP(size, (size,) * num_layers, "relu", generator)
        self.head = linear(size, size, generator=generator)

    def forward(self, obs: Obs) -> Tensor:
        """Return the outputs (N, K) float32 for normalized observations, leaf -> (N, ...)."""
        return self.head.forward(self.layers.forward(self.trunk.encode(obs))).float()
