"""Named variants of algorithms: the name of a paper stands for an algorithm and the values of some of its options.

`train("redq", env)` equals `train("sac", env, num_critics=10, ...)`. The options of a variant override presets, and
options of the user override those of the variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Variant:
    """A name for an algorithm with some options.

    Attributes:
        algorithm: Name of the registered algorithm.
        paper: Authors and year of the paper that introduced the variant.
        options: Options of `train`, by name.
    """

    algorithm: str
    paper: str
    options: Mapping[str, object]


VARIANTS: Mapping[str, Variant] = MappingProxyType({
    "redq": Variant("sac", "Chen et al. 2021", {
        "num_critics": 10, "critic_subset": 2, "update_every": 1, "num_updates": 20, "policy_delay": 20,
        "lr_q": 3e-4, "lr_pi": 3e-4, "lr_alpha": 3e-4}),
    "droq": Variant("sac", "Hiraoka et al. 2022", {
        "num_critics": 2, "critic_subset": 2, "critic_norm": "layer", "critic_dropout": 0.01, "update_every": 1,
        "num_updates": 20, "policy_delay": 20, "lr_q": 3e-4, "lr_pi": 3e-4, "lr_alpha": 3e-4}),
    "crossq": Variant("sac", "Bhatt et al. 2024", {
        "target_networks": False, "critic_norm": "batch", "policy_delay": 3, "adam_beta1": 0.5, "lr_q": 1e-3,
        "lr_pi": 1e-3, "lr_alpha": 1e-3}),
    "tqc": Variant("sac", "Kuznetsov et al. 2020", {
        "distribution": "quantile", "num_critics": 5, "num_atoms": 25, "drop_atoms": 2}),
    "c51": Variant("dqn", "Bellemare et al. 2017", {"distribution": "categorical"}),
    "qrdqn": Variant("dqn", "Dabney et al. 2018", {"distribution": "quantile"}),
    "rainbow": Variant("dqn", "Hessel et al. 2018", {
        "distribution": "categorical", "double": True, "dueling": True, "noisy": True, "prioritized": True, "n_step": 3,
        "initial_epsilon": 0.0, "final_epsilon": 0.0}),
    "td3_bc": Variant("td3", "Fujimoto and Gu 2021", {"bc_alpha": 2.5, "normalize_obs": True}),
})
"""All variants by name. A name must not be that of a registered algorithm."""
