"""Tasks on sequences of tokens, for `TokenEnv`: a prompt, an answer, and a reward that can be checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytorchrl.agent.env.aliases import EnvKwargs
from pytorchrl.agent.env.tokens import TokenEnv, TokenTask
from pytorchrl.agent.env.vec_env import EnvFactory
from pytorchrl.envs.suites import suite
from pytorchrl.errors import ConfigError

NUM_DIGITS = 10


class SortDigits(TokenTask):
    """Sort digits. The prompt has `num_digits` digits and a separator; the reward is at most 2.

    The reward is the share of positions with the right digit, plus 1 if all of them are right.

    Args:
        num_digits: Number of digits of a prompt, and of an answer.
    """

    def __init__(self, num_digits: int = 4) -> None:
        _check("num_digits", num_digits)
        self.num_tokens, self.max_prompt, self.max_answer = NUM_DIGITS + 1, num_digits + 1, num_digits

    def prompt(self, rng: np.random.Generator) -> Sequence[int]:
        """Draw the digits; the separator follows them."""
        return [*rng.integers(NUM_DIGITS, size=self.max_answer).tolist(), NUM_DIGITS]

    def reward(self, prompt: list[int], answer: list[int]) -> float:
        """Return the share of right digits, plus 1 if all are right."""
        return _score(answer, sorted(prompt[:-1]))


class Addition(TokenTask):
    """Add two numbers. The prompt is `a + b =`; the answer has the digits of the sum, from the last to the first.

    Answers begin with the last digit, so that a carry is known when it is needed. The reward is the share of positions
    with the right digit, plus 1 if all of them are right.

    Args:
        num_digits: Number of digits of each addend, which may begin with zeros.
    """

    plus, equals = NUM_DIGITS, NUM_DIGITS + 1

    def __init__(self, num_digits: int = 2) -> None:
        _check("num_digits", num_digits)
        self.num_tokens, self.max_prompt, self.max_answer = NUM_DIGITS + 2, 2 * num_digits + 2, num_digits + 1

    def prompt(self, rng: np.random.Generator) -> Sequence[int]:
        """Draw the digits of both addends."""
        first, second = rng.integers(NUM_DIGITS, size=(2, self.max_answer - 1)).tolist()
        return [*first, self.plus, *second, self.equals]

    def reward(self, prompt: list[int], answer: list[int]) -> float:
        """Return the share of right digits, plus 1 if all are right."""
        size = self.max_answer - 1
        total = sum(int("".join(map(str, digits))) for digits in (prompt[:size], prompt[size + 1:-1]))
        return _score(answer, [int(digit) for digit in reversed(f"{total:0{self.max_answer}d}")])


class Copy(TokenTask):
    """Repeat a text whose length has a heavy tail, then end the answer.

    The prompt has n random digits and a separator; the answer should be the same digits and the token `end`. The
    length n follows a discrete Pareto distribution, P(n >= m) = m ** -tail, cut off at `longest`. The reward is the
    share of right tokens, plus 1 if the whole answer is right. Missing tokens are wrong, and so are additional ones.

    Args:
        longest: Largest number of digits.
        tail: Exponent of the tail; the smaller it is, the heavier is the tail.
    """

    end = NUM_DIGITS

    def __init__(self, longest: int = 16, tail: float = 1.0) -> None:
        _check("longest", longest)
        if not tail >= 0.1:  # much smaller exponents would overflow
            raise ConfigError(f"tail must be at least 0.1, got {tail}")
        self.num_tokens, self.max_prompt, self.max_answer = NUM_DIGITS + 2, longest + 1, longest + 1
        self._longest, self._tail = longest, tail

    def prompt(self, rng: np.random.Generator) -> Sequence[int]:
        """Draw the length and the digits; the separator follows them."""
        length = min(self._longest, int((1.0 - rng.random()) ** (-1.0 / self._tail)))
        return [*rng.integers(NUM_DIGITS, size=length).tolist(), NUM_DIGITS + 1]

    def reward(self, prompt: list[int], answer: list[int]) -> float:
        """Return the share of right tokens, plus 1 if all are right."""
        return _score(answer, [*prompt[:-1], NUM_DIGITS])


TASKS: dict[str, type[TokenTask]] = {f"tokens/{task.__name__}": task for task in (SortDigits, Addition, Copy)}
"""All tasks of this module by id."""


@suite("tokens", has=lambda env_id: env_id.startswith("tokens/"))
def token_factory(
    env_id: str, vec_env_size: int = TokenEnv.Options.vec_env_size, env_kwargs: EnvKwargs | None = None,
    **options: object,
) -> EnvFactory:
    """Return a factory of environments of a token task.

    Args:
        env_id: The id, such as "tokens/SortDigits".
        vec_env_size: Number of sequences that grow at the same time.
        env_kwargs: Keyword arguments of the task.
        options: Further arguments of `TokenEnv.create_factory`.

    Raises:
        ConfigError: The id is unknown, or an option is invalid.
    """
    if env_id not in TASKS:
        raise ConfigError(f"the id of a token task must be one of {', '.join(TASKS)}, got {env_id!r}")
    return TokenEnv.create_factory(TASKS[env_id], env_kwargs, vec_env_size, **options)


def _check(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be >= 1, got {value}")


def _score(answer: list[int], wanted: list[int]) -> float:
    right = sum(map(int.__eq__, answer, wanted)) / max(len(answer), len(wanted))
    return right + (answer == wanted)
