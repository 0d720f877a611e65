"""Implement `pytorchrl train ALGORITHM ENV ...`: train an agent."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from gymnasium.spaces import Discrete

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import names, registration_of
from pytorchrl.agent.algorithms.variants import VARIANTS
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.fit import check_algorithm_space
from pytorchrl.agent.option_values.text import to_text
from pytorchrl.agent.schedules import FORMS
from pytorchrl.cli import sweep
from pytorchrl.cli.output import show, show_stderr
from pytorchrl.cli.parsing import Parser, add_option_flags, flag_of
from pytorchrl.cli.saved_agent import count
from pytorchrl.cli.watch import check_watching, watching
from pytorchrl.envs.suites import suite_of
from pytorchrl.envs.tasks import TASKS
from pytorchrl.errors import ConfigError, EnvError, StartError
from pytorchrl.files.run_directory import MODEL_NAME
from pytorchrl.learner.learner import Learner
from pytorchrl.learner.measurements import unit_of_steps
from pytorchrl.learner.reporting import by_policy, to_json
from pytorchrl.support.code import Code, Trust, is_reference, make_importable, may_import
from pytorchrl.support.problems import problems_in
from pytorchrl.training.composition import compose_parts, known_names, with_code
from pytorchrl.training.configuration import MOST_RUNS, ConfigFile, save_config, specs_of
from pytorchrl.training.presets import preset, suite_or_kind
from pytorchrl.training.training import make_learner, named_settings

# These arguments belong to the command itself. All other arguments are options of the function `train`.
_OWN = ("algorithm", "env", "json", "debug", "watch", "config", "trust", "save_config", "dry_run", "max_runs", "sweep")
_HELP = {"-h", "--help", "--help-all"}
# The algorithm whose flags the help shows if none is given.
_SHOWN = "ppo"
_WITHOUT_VALUE = ("-h", "--json", "--debug", "--watch", "--help", "--help-all", "--dry-run", "--trust")


def run(arguments: Sequence[str]) -> int:
    """Train and return the exit code."""
    given = parse("train", "Train", arguments, _add_flags)
    if given.save_config is not None:
        save_config(given.save_config, given.algorithm, given.env, _with_preset(given))
    if given.sweep is not None:
        return sweep.run(given, given.sweep, train_once)
    if given.dry_run:
        show_stderr(f"run 1 of 1: {vars(given).get('log_dir') or 'without a log_dir, so nothing is saved'}")
        return 0
    return train_once(given)


def _with_preset(given: argparse.Namespace) -> Mapping[str, object]:
    """Return the options of a run, and those of its preset."""
    options = options_of(given)
    if not given.dry_run:
        composition = compose_parts(given.algorithm, *with_code(given.algorithm, given.env, options))
        composition.problems.raise_all()
        return {**composition.options, **options}
    # A dry run builds no environment, so it knows the presets of suites, but not those of kinds.
    registration, suite = registration_of(given.algorithm, Trust.READ), suite_of(given.env)
    options = {**registration.options, **options}
    return {**preset(registration.name, "" if suite is None else suite.name, options), **options}


def train_once(given: argparse.Namespace) -> int:
    """Execute one run and return the exit code."""
    if given.watch:
        check_watching(vars(given).get("log_dir"))
        vars(given).setdefault("progress", False)
        vars(given).setdefault("log_every_s", 1.0)
    learner = learner_of(given)
    try:
        with contextlib.nullcontext() if learner.log_dir is None or not given.watch else watching(learner.log_dir):
            _train(learner)
    except (KeyboardInterrupt, SystemExit):
        _show(learner, given)
        raise
    _show(learner, given)
    return 0


def _add_flags(parser: Parser) -> None:
    parser.add_argument("--watch", action="store_true", help="show the worker tree live instead of the progress line")
    parser.add_argument("--save-config", metavar="FILE", help=parser.rare(
        "write all options of this run, including those of the preset, to a TOML file"))
    parser.add_argument("--dry-run", action="store_true", help=parser.rare(
        "check the options and list the runs; import nothing that a file names, and start nothing"))
    parser.add_argument("--max-runs", type=count, default=MOST_RUNS, metavar="INT",
                        help=parser.rare(f"largest number of runs of a sweep [{MOST_RUNS}]"))


def learner_of(given: argparse.Namespace) -> Learner:
    """Return a learner for the given flags; it is not started yet.

    Raises:
        StartError: An environment does not work.
    """
    try:
        return make_learner(given.algorithm, given.env, **options_of(given))[0]
    except ConfigError as error:
        if given.config is None:
            raise
        raise given.config.located(error, options_of(given)) from error
    except EnvError as error:  # `make_learner` builds an environment to read the observation and action spaces
        raise StartError(str(error)) from error


def options_of(given: argparse.Namespace) -> dict[str, object]:
    """Return the parsed arguments that are options of the function `train`, by name."""
    return {name: value for name, value in vars(given).items() if name not in _OWN}


@contextlib.contextmanager
def refusing_broken_envs(learner: Learner) -> Iterator[None]:
    """Raise a `StartError` if the `with` block raises an `EnvError` before the first update."""
    try:
        yield
    except EnvError as error:
        if learner.updates == 0:
            raise StartError(str(error)) from error
        raise


def _train(learner: Learner) -> None:
    try:
        with refusing_broken_envs(learner), learner:
            learner.train()
    except KeyboardInterrupt:
        if not learner.stopped:  # a second Ctrl-C ended training without `stop`; do not wait for workers
            os._exit(130)
        raise
    except SystemExit as ended:
        if not learner.stopped:
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        raise


def _show(learner: Learner, given: argparse.Namespace) -> None:
    """Print a summary of the run; with `--json`, print it as one line of JSON."""
    summary = learner.summary()
    if given.json:
        show(to_json(summary))
        return
    returns, steps, target = summary["return_mean"], summary["env_steps"], learner.target_steps
    collected = "" if unit_of_steps(summary["scheme"]) == "updates" else (
        f"{steps:,} env steps{f' (target {target:,})' if steps > target else ''}, ")
    show(f"{collected}{summary['updates']:,} updates in "
         f"{summary['seconds']:.1f} s ({summary['env_steps_per_s']:,.0f} steps/s), seed {summary['seed']}")
    if returns is not None:
        show(f"mean return of the last {summary['return_episodes']} training episodes: {returns:.1f}"
             f"{by_policy(summary.get('policy_return_means'))}")
    if not learner.options.progress:  # the progress line has ended with these sentences
        show(*summary["findings"])
    if learner.log_dir is not None and (learner.log_dir / f"{MODEL_NAME}.pt").exists():
        run_dir = shlex.quote(str(learner.log_dir))
        algorithm = f" --algorithm {given.algorithm}" if is_reference(given.algorithm) else ""
        show(f"saved in {learner.log_dir}; what to do next:",
             f"  pytorchrl enjoy {run_dir}{algorithm}", f"  pytorchrl plot {run_dir}", f"  pytorchrl report {run_dir}")
    elif learner.log_dir is None:
        show("nothing was saved; --log-dir DIR saves a run")


def parse(command: str, verb: str, arguments: Sequence[str],
          add_flags: Callable[[Parser], None] = lambda parser: None) -> argparse.Namespace:
    """Parse the arguments of a command that trains; `add_flags` adds flags that only this command has.

    Raises:
        SystemExit: The help was printed, or a flag is not valid.
    """
    trust, is_dry = Trust.ALL if "--trust" in arguments else Trust.INSTALLED, "--dry-run" in arguments
    config = ConfigFile(path, trust) if (path := _given(arguments, "--config")) else None
    algorithm, is_general = _algorithm_in(arguments), False
    is_in_file = algorithm is None and config is not None and config.algorithm is not None
    if is_in_file and config is not None:
        algorithm = config.algorithm
    if algorithm is None:
        is_general = not arguments or bool(_HELP & set(arguments))
        algorithm = _SHOWN if is_general else _refuse_algorithm(command, arguments)
    if trust is Trust.ALL or (is_reference(algorithm) and not is_in_file):
        make_importable()
    own = _class_of(algorithm, config if is_in_file else None, Trust.READ if is_dry else trust)
    stored = {} if config is None else config.options(own)
    parser = _parser(command, verb, (algorithm, own), _suite_in_help(own, arguments, config),
                     _given(arguments, "--preset") or str(stored.get("preset", "")), show_all="--help-all" in arguments)
    add_flags(parser)
    if is_general:
        _show_general_help(parser, command, verb)
        raise SystemExit(0 if arguments else 2)
    # The algorithm goes first, so that a flag with several values cannot consume it.
    others = list(arguments)
    if not is_in_file:
        others.remove(algorithm)
    given = parser.parse([algorithm, *others], spare="env_word")
    if given.trust and config is None:
        parser.error("--trust is about the code that a configuration file names, so it needs --config")
    word = vars(given).pop("env_word")
    if word is not None and given.env not in (None, word):
        parser.error(f"there are two environments, {word!r} and --env {given.env!r}; give one of them")
    env = word or given.env
    if _names_code(env or "", *options_of(given).values()):
        make_importable()
    given.env = env if env is not None or config is None else config.env
    if given.env is None:
        parser.error(f"the environment is missing; give it as in `pytorchrl {command} {algorithm} {_env_for(own)}`, "
                     "or with --env")
    vars(given).update({name: value for name, value in stored.items() if name not in vars(given)})
    given.config = config
    most = getattr(given, "max_runs", MOST_RUNS)
    given.sweep = config.runs(own, most) if config is not None and config.is_sweep else None
    return given


def _show_general_help(parser: Parser, command: str, verb: str) -> None:
    """Print the help of a command without an algorithm; `parser` is that of the algorithm `_SHOWN`."""
    parser.usage = f"pytorchrl {command} ALGORITHM ENV [flags]"
    parser.description = (f"{verb} an agent. ALGORITHM is {', '.join(names())}, or MODULE:CLASS of your own. The "
                          f"defaults are those of {_SHOWN}.")
    parser.print_help()


def _refuse_algorithm(command: str, arguments: Sequence[str]) -> NoReturn:
    """Exit with an error, because no argument names an algorithm."""
    word = arguments[0] if not arguments[0].startswith("-") else ""
    near = difflib.get_close_matches(word.lower(), names(), n=1)
    Parser(prog=f"pytorchrl {command}", usage=f"pytorchrl {command} ALGORITHM ENV [flags]").error(
        f"the algorithm must be one of {', '.join(names())} or MODULE:CLASS" + (f", got {word!r}" if word else "")
        + (f"; did you mean {near[0]!r}?" if near else ""))


def _env_for(algorithm: type[Algorithm] | None) -> str:
    """Return the id of a small environment for examples, which the algorithm can learn."""
    if algorithm is not None and registration_of(algorithm).environments is TokenEnv:
        return next(iter(TASKS))
    is_unfit = algorithm is not None and problems_in(check_algorithm_space, algorithm, Discrete(2))
    return "Pendulum-v1" if is_unfit else "CartPole-v1"


def _suite_in_help(
    algorithm: type[Algorithm] | None, arguments: Sequence[str], config: ConfigFile | None) -> str:
    """Return the suite or kind whose preset the help shows; "" without help, or if it is not known.

    To find the kind, an environment is built, but only if the user names it, and not if only the file of `config` does.
    """
    if algorithm is None or not _HELP & set(arguments):
        return ""
    own = next(filter(_is_algorithm, _free_words(arguments)), None)
    words = [word for word in _free_words(arguments) if word != own]
    if wanted := _given(arguments, "--env") or next(iter(words), ""):
        return suite_or_kind(registration_of(algorithm).name, with_code(algorithm, wanted, {})[0])
    suite = None if config is None else suite_of(config.env)
    return "" if suite is None else suite.name


def _class_of(algorithm: str, file: ConfigFile | None, trust: Trust) -> type[Algorithm] | None:
    """Return the class of the algorithm; None in a dry run if the class is not imported.

    Args:
        algorithm: Name of the algorithm, or "module:Class".
        file: The file that names the algorithm; None if the user does, whose word is trusted.
        trust: The modules that may be imported because the file names them.
    """
    if file is None:
        return registration_of(algorithm).algorithm
    if trust is Trust.READ and is_reference(algorithm) and not may_import(algorithm.partition(":")[0], trust):
        show_stderr(f"{algorithm} is not imported in a dry run, so its own options are not checked")
        return None
    return file.own_algorithm(trust)


def _names_code(env: str, *values: object) -> bool:
    """Return whether an id contains the name of a module, or a value of an option is a `Code` or contains some."""
    codes = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return ":" in env or "." in env or env.isidentifier() or any(isinstance(item, Code) for item in codes)


def _is_algorithm(word: str) -> bool:
    """Return whether a word is the name of an algorithm, or may name one as "module:Class"."""
    return word in names() or is_reference(word)


def _free_words(arguments: Sequence[str]) -> list[str]:
    """Return the words that are neither flags nor follow a flag, of which they would be the value."""
    return [word for before, word in zip(["", *arguments], arguments, strict=False)
            if not word.startswith("-") and (not before.startswith("--") or "=" in before or before.startswith("--no-")
                                             or before in _WITHOUT_VALUE)]


def _algorithm_in(arguments: Sequence[str]) -> str | None:
    """Return the word that names the algorithm; None if there is none."""
    # First search the words that are not values of flags, because a value may look like an algorithm, as in
    # `--preset impala` or `--env my_envs:Maze`.
    return next(filter(_is_algorithm, _free_words(arguments)),
                next((word for word in arguments if word in names()), None))


def _given(arguments: Sequence[str], flag: str) -> str:
    """Find the value of a flag without a parser; return "" if the flag is not given."""
    for word, following in itertools.pairwise([*arguments, ""]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return ""


def _parser(
    command: str, verb: str, algorithm: tuple[str, type[Algorithm] | None], suite: str, scheme: str, *, show_all: bool,
) -> Parser:
    name, own = algorithm
    shown = f"the preset {suite!r} for this environment" if suite else "the algorithm; with ENV, of its preset"
    env = _env_for(own)
    example, size = f"pytorchrl {command} {name} {env}", "--width 64" if env in TASKS else "--hidden-sizes 64 64"
    details = f" A SCHEDULE is {FORMS}." if show_all else ""
    parser = Parser(
        prog=f"pytorchrl {command} {name}", usage=f"pytorchrl {command} {name} ENV [flags]", is_short=not show_all,
        description=f"{verb} {_described(name, own)}. ENV is a gymnasium id or MODULE:NAME of your "
                    f"own. In brackets: the defaults of {shown}.{details}",
        epilog=f"examples:\n  {example} --log-dir runs/a\n  {example} --num-col-workers 2 --eval-every 5000\n"
               f"  pytorchrl {command} {name} my_envs:Maze --gamma 0.98 {size}\n\n"
               "exit codes: 0 success, 1 error during training, 2 error before training,\n130 Ctrl-C, 143 SIGTERM",
        known={} if own is None else known_names(own))
    parser.add_argument("algorithm", choices=[name], help=argparse.SUPPRESS)
    parser.add_argument("--env", metavar="ENV", help=parser.rare(
        "the environment, which may also follow the algorithm: a gymnasium id, e.g. CartPole-v1 or ALE/Pong-v5; your "
        "own: MODULE:ID, or the MODULE:NAME of a class or function; for several agents, the module of a PettingZoo "
        "environment, e.g. mpe2.simple_spread_v3"))
    parser.add_argument("--config", metavar="FILE",
                        help="TOML file with options, or the run.json of a run; flags override it")
    parser.add_argument("--trust", action="store_true", help=parser.rare(
        "import all code that the file of --config names: also functions, and modules of the working directory (else "
        "only parts of installed packages)"))
    parser.add_argument("--help-all", action="help", help="show all flags, and exit")
    parser.add_argument("--json", action="store_true",
                        help=parser.rare("print the run's figures as JSON, in the last line"))
    parser.add_argument("--debug", action="store_true", help=parser.rare("show tracebacks of errors"))
    of_variant = VARIANTS[name].options if name in VARIANTS else {}
    defaults = preset("" if own is None else registration_of(own).name, suite, of_variant)
    add_option_flags(parser, specs_of(own), {**named_settings(scheme), **defaults, **of_variant}, show_all=show_all)
    return parser


def _described(name: str, algorithm: type[Algorithm] | None) -> str:
    """Return the name of an algorithm and, for a variant, its paper and the flags for which it stands."""
    if algorithm is None or name not in VARIANTS:
        return name if algorithm is None else algorithm.__name__
    variant = VARIANTS[name]
    flags = " ".join(f"{flag_of(option)} {to_text(value)}" for option, value in variant.options.items())
    return f"{name} ({variant.paper}), which is {variant.algorithm} with {flags}"
