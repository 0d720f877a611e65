"""Compose an agent, a scheme and a learner from the options of `train`.

Each option has exactly one owner, to which it is passed: a part of the agent, the scheme or the learner. The flags of
the command line are built from the same list of options; see `option_specs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import gymnasium as gym

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.actors.memory import MEMORIES
from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import Registration, registration_of
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.dataset import read_dataset
from pytorchrl.agent.declarations import as_member
from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.single import GivenEnv, is_vector
from pytorchrl.agent.factories import ActorFactory, Agent, AlgorithmFactory, StorageFactory
from pytorchrl.agent.fit import check_algorithm_space, learned_kind_of
from pytorchrl.agent.multi.compose import multi_agent
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.names import Known, meaning, refuse_unknown
from pytorchrl.agent.option_values.descriptions import check_arguments, find_part
from pytorchrl.agent.option_values.text import takes_code
from pytorchrl.agent.options import Factory, declaring, options_class
from pytorchrl.agent.storages import GroupBuffer, ReplayBuffer, Storage
from pytorchrl.agent.storages.sequences import SEQUENCES_OF
from pytorchrl.callbacks.base import Callback
from pytorchrl.envs import make_factory
from pytorchrl.envs.suites import VEC_ENV_SIZE
from pytorchrl.errors import CheckpointError, ConfigError, Problem
from pytorchrl.learner.learner import Learner
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.options.settings import LEVELS, declaration_of, default_of_keyword, names_of_level
from pytorchrl.support.code import Code, Trust, as_code, import_module, may_import, refusal
from pytorchrl.support.numbers import check_whole, plain
from pytorchrl.support.problems import Problems, problems_in
from pytorchrl.support.untyped import OptionValue
from pytorchrl.training import presets
from pytorchrl.training.presets import EnvMaker, EnvSource

# Options that are renamed in `train`: for each part, a mapping from the name in the part to the name in `train`.
_RENAMED = {"environments": {"vec_env_size": "num_envs", "policy_of": "policies"}, "storage": {"size": "num_steps"}}
_RENAMED_IN_REPLAY = {"size": "replay_size", "rollout_size": "num_steps", "epsilon": "priority_epsilon"}
_EVALUATION_ENVS = 8
_MANY = 1_000_000
_NOT_OPTIONS = {"environments": {"env_fn", "log_dir", "num_threads"}, "actor": {"observation_space", "action_space"},
                "storage": {"group_size"}}  # that of the environments
_POLICIES = typing.Union[  # noqa: UP007 - a Literal next to a generic class
    typing.Literal["shared", "independent"], Mapping[str, str], Callable[[str], str], None]
_KINDS = (None, "sequence", "batch")

GROUPS: Mapping[str, str] = {
    "collection": "collection: workers that step environments, and the queue to the learner",
    "replay": "replay: shards between collection workers and the learner",
    "gradients": "gradients: gradient workers and their batches",
    "updates": "updates: how gradients become new weights",
    "runtime": "runtime: processes, devices, seeds and records",
    "supervision": "supervision: lost and hanging workers",
}
"""The title of each group of the scheme's options in `--help`."""
_GROUP_OF = {"queue": "collection", "recording": "runtime", "process": "runtime"}


@dataclass(frozen=True)
class OptionSpec:
    """One option of `train`.

    Attributes:
        name: Name of the option in `train` and in `run.json`.
        part: Owner of the option: environments, actor, algorithm, storage, scheme or learner.
        own_name: Name of the option in that part.
        hint: Type of the option, as `typing.get_type_hints` returns it.
        default: Default of the option.
        help: Description in one or two sentences.
        choices: All allowed values, if they are a closed set; otherwise None.
        group: Group of the option in `--help`. For an option of the scheme, this is a key of `GROUPS`;
            for other options, it is the same as `part`.
        is_users: Whether a class outside this package declares the option.
    """

    name: str
    part: str
    own_name: str
    hint: object
    default: object
    help: str
    choices: tuple[object, ...] | None = None
    group: str = ""
    is_users: bool = False


def option_specs(algorithm: str | type[Algorithm]) -> dict[str, OptionSpec]:
    """Return all options of `train(algorithm, ...)`, by name.

    Raises:
        ConfigError: There is no such algorithm, or two parts have an option of the same name.
    """
    registration = registration_of(algorithm)
    parts: dict[str, type] = {
        "learner": Learner, "algorithm": registration.algorithm,
        "storage": _usual_storage(registration), "actor": registration.actor,
        "environments": registration.environments or VecEnv}
    found = [spec for part, owner in parts.items() for spec in _declared(part, owner)]
    found += scheme_options()
    found += _sequence_options(registration)
    if registration.prioritized_storage is not None:
        found.append(OptionSpec(
            name="prioritized", part="storage", own_name="prioritized", hint=bool, default=False, group="storage",
            help="Sample transitions with large TD errors more often; alpha, beta and priority_epsilon set how much."))
    if registration.rollout_storage is not None:
        found.append(OptionSpec(
            name="kind", part="storage", own_name="kind", hint=str | None, default=None, choices=_KINDS, group="replay",
            help="Data that replay shards sample: \"sequence\" (the default) or, for whole rollouts, \"batch\"."))
    found.append(OptionSpec(
        name="policies", part="environments", own_name="policy_of", hint=_POLICIES, default=None, group="environments",
        help="Policies of environments with several agents: one for all agents (shared, the default), one for each "
             "agent (independent), or a mapping from agent to policy."))
    found.append(OptionSpec(
        name="num_eval_envs", part="evaluation", own_name="num_eval_envs", hint=int, default=_EVALUATION_ENVS,
        group="environments",
        help="Largest number of environments that an evaluation steps together; never more than its episodes."))
    if registration.algorithm.learns_from is DataKind.OLDER_ROLLOUTS:  # else, `ReplayBuffer` declares the option
        found.append(OptionSpec(
            name="replay_size", part="scheme", own_name="size", hint=typing.Optional[int], default=None,  # noqa: UP045
            help="Env steps that all replay shards store in total; used with num_replay_workers.", group="replay"))
    specs: dict[str, OptionSpec] = {}
    for spec in found:
        if spec.name in specs:
            raise ConfigError(f"{spec.name!r} is an option of the {spec.part} and of the {specs[spec.name].part}; "
                              f"rename it in {registration.algorithm.__name__} or in the part that it is registered "
                              "with")
        specs[spec.name] = spec
    return specs


def _usual_storage(registration: Registration) -> type[Storage]:
    """Return the storage with the most options for actors without memory."""
    return registration.prioritized_storage or registration.storage


def _sequence_options(registration: Registration) -> list[OptionSpec]:
    """Return the options that only the storage for actors with memory has; none if the algorithm cannot train these."""
    storage = _usual_storage(registration)
    if not any(learned_kind_of(registration.algorithm, memory) is DataKind.SEQUENCES for memory in MEMORIES):
        return []
    usual = options_class(storage).declarations()
    return [spec for spec in _declared("storage", SEQUENCES_OF.get(storage, storage)) if spec.own_name not in usual]


def scheme_options() -> list[OptionSpec]:
    """Return the options of the scheme; the first is `preset`, which selects an architecture such as IMPALA.

    The scheme's setting `size` is left out, because the storage also has an option `size`. In `train`, the option
    `replay_size` takes its place.
    """
    found = [OptionSpec(
        name="preset", part="scheme", own_name="preset", hint=str | None, default=None, choices=(None, *PRESETS),
        help="An architecture from the literature, such as \"impala\"; its settings apply unless you "
             "give others.", group="collection")]
    for level in LEVELS:
        for name in names_of_level(level):
            if name != "size":
                declaration = declaration_of(name)
                found.append(OptionSpec(
                    name, "scheme", name, declaration.type, default_of_keyword(name), declaration.help,
                    declaration.choices, _GROUP_OF.get(level, level)))
    return found


def known_names(algorithm: str | type[Algorithm]) -> Known:
    """Return, for each option of `train(algorithm, ...)`, its part and its name in that part; see `Known`."""
    of_storage, specs = _usual_storage(registration_of(algorithm)).home, option_specs(algorithm).values()
    return {"env": ("environments", "env_fn"),
            **{spec.name: (of_storage if spec.part == "storage" else spec.part, spec.own_name) for spec in specs}}


def _declared(part: str, owner: type) -> list[OptionSpec]:
    options = options_class(owner)
    renamed, left_out = _RENAMED.get(part, {}), _NOT_OPTIONS.get(part, set())
    if issubclass(owner, ReplayBuffer):
        renamed = _RENAMED_IN_REPLAY
    elif issubclass(owner, GroupBuffer):
        renamed = {"size": "num_groups"}
    return [
        OptionSpec(
            name=renamed.get(name, name), part=part, own_name=name, hint=declaration.type,
            default=None if declaration.is_required else declaration.default, help=declaration.help,
            choices=declaration.choices, group=part, is_users=not _is_ours(declaring(options, name)))
        for name, declaration in options.declarations().items() if name not in left_out
    ]


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == __name__.split(".")[0]


@dataclass(frozen=True)
class Composition:
    """The options of `train`, divided among their owners.

    Attributes:
        agent: The agent; None if a part could not be built.
        scheme: Keyword arguments of the scheme.
        learner: Options of the learner, including `target_steps`.
        preset: Name of the suite or the kind of environments whose preset completes the options; "" if there is none.
        options: The user's options and those of the preset.
        problems: The problems found so far.
    """

    agent: Agent | None
    scheme: dict[str, OptionValue]
    learner: dict[str, OptionValue]
    preset: str
    options: dict[str, object]
    problems: Problems


def with_code(
    algorithm: str | type[Algorithm], env: EnvSource, options: Mapping[str, object],
) -> tuple[EnvMaker, dict[str, object]]:
    """Return the environment and the options with the code that they name, which is imported.

    The short form of a choice, such as "async", is replaced by the choice. If `algorithm` is the name of a variant, its
    options are added.

    Raises:
        ConfigError: Code must not or cannot be imported, or is of the wrong kind; the message names the option.
    """
    registration = registration_of(algorithm)
    of_variant = registration.options if options.get("dataset") is None else presets.without_pace(registration.options)
    specs, found = option_specs(algorithm), {**of_variant, **options}
    for name, value in options.items():
        if name not in specs or not takes_code(specs[name].hint):
            if name in specs and specs[name].choices:
                found[name] = as_member(specs[name].hint, value)
            continue
        try:
            found[name] = (tuple(_imported(item, name) for item in value) if isinstance(value, tuple | list)
                           else _imported(value, name))
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"{name}: {error}") from error
    return _environment(env), found


def code_of(code: Code) -> object:
    """Return the class, function or object that is named, which is imported.

    Raises:
        ConfigError: It must not or cannot be imported, or is of the wrong kind.
        CheckpointError: It must not get arguments from a file.
    """
    found = find_part(code.reference, code.trust, Callback)
    if code.arguments and code.trust is not Trust.ALL:
        check_arguments(found)
    return found


def _imported(value: object, option: str) -> object:
    """Return the code that a value of an option names; return any other value unchanged."""
    code = as_code(value)
    if not isinstance(code, Code):
        return value
    found = code_of(code)
    if not callable(found):
        if code.arguments:
            raise ConfigError(f"{code.reference} takes no arguments, because it is neither a class nor a function")
        return found
    if option != "callbacks":
        return functools.partial(found, **code.arguments) if code.arguments else found
    try:
        return found(**code.arguments)
    except TypeError as error:
        raise ConfigError(f"{code} cannot be built: {error}") from error


def _environment(env: EnvSource) -> EnvMaker:
    """Return an environment that is named `module:name`: the id that the module registers, or the code."""
    code = as_code(env)
    if not isinstance(code, Code):
        assert not isinstance(env, Code)
        return env
    module, _, name = code.reference.partition(":")
    if not may_import(module, code.trust):
        raise ConfigError(refusal(code.reference))
    import_module(module, code.reference)
    if name in gym.registry:
        return code.reference
    found = find_part(code.reference, code.trust)
    if not callable(found):
        raise ConfigError(f"env {code.reference!r} is neither a registered id, a class nor a function, got {found!r}")
    return found


def compose(
    algorithm: str | type[Algorithm], env: EnvSource, options: Mapping[str, object],
) -> tuple[Agent, dict[str, OptionValue], dict[str, OptionValue]]:
    """Complete `options` from the preset for `algorithm` and `env`, and divide them among agent, scheme and learner.

    Returns:
        The agent, the scheme's keyword arguments, and the learner's options (including `target_steps`).

    Raises:
        ConfigError: Options are unknown or wrong; the message lists all problems.
    """
    composition = compose_parts(algorithm, *with_code(algorithm, env, options))
    composition.problems.raise_all()
    assert composition.agent is not None, "a part that cannot be built is a problem"
    return composition.agent, composition.scheme, composition.learner


def compose_parts(
    algorithm: str | type[Algorithm], env: EnvMaker, options: Mapping[str, object],
) -> Composition:
    """Complete and divide `options` as `compose` does, but return the problems of options instead of raising them."""
    registration = registration_of(algorithm)
    specs = option_specs(algorithm)
    problems, own = Problems(), Problems()  # `own`: with the names of the parts
    build = functools.partial(own.build, functools.partial(make_factory, env))
    built: list[EnvFactory | None] = []

    is_one = isinstance(env, gym.Env) and not is_vector(env)

    def read_spaces() -> EnvFactory | None:
        # The environments may determine their number themselves, so only the user's number is requested here.
        built.append(build({"vec_env_size": 1, **_divided(specs, options)["environments"]}))
        return built[0]

    suite = presets.suite_or_kind(registration.name, env, read_spaces)
    preset = {name: option for name, option in presets.preset(registration.name, suite, options).items()
              if name not in options}
    if is_one:
        preset = presets.for_one_environment(preset)
    elif built and built[0] is not None and built[0].has_own_size:
        preset.pop("num_envs", None)
    if "start_steps" in specs:
        preset = _without_collection(registration, preset, options, problems)
    chosen = {**preset, **options}
    if _has_shards(options):
        defaults = {name: spec.default for name, spec in specs.items()}
        chosen = {**presets.replay_ratios(options, defaults | chosen), **chosen}
    for problem in problems_in(refuse_unknown, chosen, known_names(algorithm)):
        problems.wrong(problem)
    parts, of_preset = _divided(specs, chosen), _divided(specs, preset)["environments"]
    if not built:
        built.append(build(parts["environments"]))
    elif built[0] is not None:
        if not is_one and not built[0].has_own_size and "num_envs" not in options:
            of_preset.setdefault("vec_env_size", VEC_ENV_SIZE)
        # The number of environments does not change their spaces, so no further environment is built for it.
        is_number = of_preset.keys() <= {"vec_env_size"}
        built = [built[0].with_options(**of_preset) if is_number else build(parts["environments"])]
    chosen = _without_options_of_boxes(preset, chosen, built[0])
    parts = _divided(specs, chosen)
    agent = _agent(registration, built[0], parts, own)
    problems.found += [replace(problem, text=_in_users_words(problem.text, specs.values())) for problem in own.found]
    problems.ignore(own)
    return Composition(agent, parts["scheme"], parts["learner"], suite, chosen, problems)


def _without_options_of_boxes(
    preset: Mapping[str, object], chosen: dict[str, object], envs: EnvFactory | None,
) -> dict[str, object]:
    """Return the options without those of a preset for MPO that need a Box, if the environments have other actions."""
    if preset.get("policy") != "gaussian" or envs is None or isinstance(
            getattr(envs, "action_space", None), gym.spaces.Box):
        return chosen
    return {name: value for name, value in chosen.items()
            if name not in ("policy", "sample_action_num") or name not in preset}


def _without_collection(
    registration: Registration, preset: dict[str, object], options: Mapping[str, object], problems: Problems,
) -> dict[str, object]:
    """Return the preset of a replay algorithm; if there is a data set, without options of collection.

    Options of the user that would have no effect are added to `problems`.
    """
    if options.get("dataset") is None:
        needs_data = getattr(registration.algorithm, "needs_dataset", False)
        return {"replay_size": _MANY, **preset} if needs_data else preset  # the scheme refuses the missing data set
    if idle := [name for name in ("num_envs", "num_steps") if options.get(name, 1) != 1]:
        problems.add([Problem(f"{' and '.join(idle)} would have no effect, because nothing is collected if there is a "
                              "dataset", f"leave out {' and '.join(idle)}", tuple(idle))])
    num_steps = _MANY  # if the data set cannot be read, which the scheme reports
    with contextlib.suppress(CheckpointError, ConfigError):
        num_steps = len(read_dataset(str(options["dataset"])).rewards)
    return presets.without_collection(preset, num_steps)


def _has_shards(options: Mapping[str, object]) -> bool:
    """Return whether the user chooses replay shards, by their number or by an architecture."""
    if "num_replay_workers" in options:
        return options["num_replay_workers"] is not None
    architecture = options.get("preset")
    return (isinstance(architecture, str) and architecture in PRESETS
            and "num_replay_workers" in PRESETS[architecture].settings({}))


def _divided(specs: Mapping[str, OptionSpec], options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the options of each part, under their names in the part; options without a part are left out."""
    parts: dict[str, dict[str, object]] = {spec.part: {} for spec in specs.values()}
    for name, value in options.items():
        if name in specs:
            parts[specs[name].part][specs[name].own_name] = value
    return parts


def _agent(
    registration: Registration, train_envs: EnvFactory | None, parts: Mapping[str, dict[str, object]],
    problems: Problems,
) -> Agent | None:
    """Return the agent, whose wrong options are left out; None if a part cannot be built.

    If there are several policies, all use the same options.
    """
    algorithm = problems.build(registration.algorithm.create_factory, parts["algorithm"])
    memory = parts["actor"].get("recurrent_net")
    storage = problems.build(lambda **own: storage_factory(registration, own, memory), parts["storage"])
    number = problems.build(_checked_number, parts["evaluation"])
    if train_envs is None or number is None:
        return None
    # An environment that is given as an object cannot be copied, so it is also the one in which the agent plays.
    is_given = isinstance(train_envs.options.env_fn, GivenEnv)
    test_envs = None if is_given else (
        train_envs if train_envs.has_own_size else train_envs.with_options(vec_env_size=number))
    make_actor: Callable[..., Factory[Actor]] = (
        registration.actor.create_factory)  # type: ignore[attr-defined] # all actors have this method
    if isinstance(train_envs, MultiAgentEnvFactory):
        if algorithm is None or storage is None:
            return None
        make = functools.partial(_several, train_envs, algorithm, make_actor, storage)
        found = problems.build(make, parts["actor"])
        return None if found is None else Agent(*found, train_envs, test_envs)
    if unfit := problems_in(check_algorithm_space, registration.algorithm, train_envs.action_space):
        problems.add(unfit)
        return None
    actor = problems.build(
        functools.partial(make_actor, train_envs.observation_space, train_envs.action_space), parts["actor"])
    if algorithm is None or actor is None or storage is None:
        return None
    return Agent(algorithm, actor, storage, train_envs, test_envs)


def _checked_number(num_eval_envs: object = _EVALUATION_ENVS) -> int:
    return check_whole("num_eval_envs", num_eval_envs)


def _several(
    envs: MultiAgentEnvFactory, algorithm: Factory[Algorithm], make_actor: Callable[..., Factory[Actor]],
    storage: Factory[Storage], checkpoint: str | None = None, **of_actor: object,
) -> tuple[AlgorithmFactory, ActorFactory, StorageFactory]:
    """Return the factories of several policies; `checkpoint` is one model file for all of them."""
    return multi_agent(envs, algorithm, functools.partial(make_actor, **of_actor), storage, checkpoint=checkpoint)


def storage_factory(
    registration: Registration, options: Mapping[str, OptionValue], memory: object = None,
) -> Factory[Storage]:
    """Return the factory of the storage that an algorithm is registered with.

    An algorithm that learns from transitions gets a storage of sequences, with the same defaults, if its actor has
    memory.

    Args:
        registration: The algorithm.
        options: Options of the storage, and possibly `prioritized` and `kind`; `kind="batch"` chooses the storage of
            whole rollouts.
        memory: Value of the actor's option `recurrent_net`.

    Raises:
        ConfigError: An option is wrong, or has no effect in this storage.
    """
    own = dict(options)
    kind = own.pop("kind", None)
    if kind not in _KINDS:
        raise ConfigError(f"kind must be one of {list(_KINDS)}, got {kind!r}")
    if kind == "batch" and registration.rollout_storage is not None:
        return _factory_without(
            registration.rollout_storage, own, "whole rollouts are drawn uniformly; leave out kind='batch'")
    if registration.prioritized_storage is None:
        return registration.storage.create_factory(**own)
    is_prioritized = plain(own.pop("prioritized", False))
    if not isinstance(is_prioritized, bool):
        raise ConfigError(f"prioritized must be True or False, got {is_prioritized!r}")
    storage = registration.prioritized_storage if is_prioritized else registration.storage
    of_sequences = {spec.own_name for spec in _sequence_options(registration)}
    if learned_kind_of(registration.algorithm, memory) is DataKind.SEQUENCES and storage in SEQUENCES_OF:
        usual = {name: declared.default for name, declared in options_class(storage).declarations().items()
                 if not declared.is_required}
        storage, own = SEQUENCES_OF[storage], {**usual, **own}
    elif others := [name for name in own if name in of_sequences]:
        raise ConfigError(f"{', '.join(others)} would be ignored: without memory, single transitions are drawn; add "
                          "recurrent_net='gru' or 'lstm'")
    if is_prioritized:
        return storage.create_factory(**own)
    # The user may have meant an option of the algorithm: in other libraries, `alpha` is the entropy weight of SAC.
    elsewhere = {name: place for name, place in known_names(registration.algorithm).items() if place[0] != "replay"}
    hints = "".join(meaning(name, elsewhere) for name in own)
    drawn = "sequences" if storage.provides is DataKind.SEQUENCES else "transitions"
    return _factory_without(storage, own, f"{drawn} are drawn uniformly; add prioritized=True{hints}")


def _factory_without(storage: type[Storage], options: dict[str, OptionValue], why: str) -> Factory[Storage]:
    """Return a factory of `storage`; raise `ConfigError` with the reason `why` for options that `storage` lacks."""
    own = {field.name for field in dataclasses.fields(options_class(storage))}
    if others := [_RENAMED_IN_REPLAY.get(name, name) for name in options if name not in own]:
        raise ConfigError(f"{', '.join(others)} would be ignored: {why}")
    return storage.create_factory(**options)


def _in_users_words(text: str, specs: Iterable[OptionSpec]) -> str:
    """Replace the names of environment and storage options in an error message by the names that `train` uses."""
    for spec in specs:
        if spec.part in ("environments", "storage") and spec.own_name != spec.name:
            text = re.sub(rf"\b{spec.own_name}(?= must\b)|(?<= needs ){spec.own_name}$", spec.name, text)
    return text
