"""Tests that an error arrives in another process with its traceback and its causes."""

from __future__ import annotations

import pickle
import traceback

import pytest

from pytorchrl.errors import WorkerError
from pytorchrl.runtime.remote_errors import SentError


class PickyError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def inner(kind):
    raise kind


def caused(kind):
    try:
        inner(kind)
    except (KeyError, SystemExit, PickyError) as error:
        raise RuntimeError("caused") from error


def handled(kind):
    try:
        inner(kind)
    finally:
        [].index(
            0)


def silenced(kind):
    try:
        inner(kind)
    except (KeyError, SystemExit):
        raise RuntimeError("silenced") from None


def caught(function, kind):
    with pytest.raises(BaseException) as found:  # noqa: PT011 - any exception
        function(kind)
    return found.value


def received(error):
    """Return an error as another process receives it, twice: workers forward the errors of their workers."""
    for _ in range(2):
        error = pickle.loads(pickle.dumps(SentError.of(error))).received()
    return error


@pytest.mark.parametrize("function", [inner, caused, handled, silenced])
@pytest.mark.parametrize("kind", [KeyError(3), SystemExit(2)], ids=["KeyError", "SystemExit"])
def test_an_error_looks_the_same_in_another_process(function, kind):
    error = caught(function, kind)
    again = received(error)
    assert type(again) is type(error)
    assert again.args == error.args
    assert traceback.format_exception(again) == traceback.format_exception(error)
    assert len(traceback.format_exception(again)) > 3


def test_frames_name_their_modules():
    trace = received(caught(inner, ValueError())).__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_globals["__name__"] == __name__


def test_an_error_that_cannot_be_pickled_arrives_as_text():
    again = received(caught(caused, PickyError(1, 2)))
    assert type(again) is RuntimeError
    assert (type(again.__cause__), str(again.__cause__)) == (WorkerError, "PickyError: 1 2")
    assert traceback.extract_tb(again.__cause__.__traceback__)[-1].name == "inner"


def test_attributes_of_an_error_are_kept():
    error = caught(inner, ValueError("wrong"))
    error.part = [1, 2]
    assert received(error).part == [1, 2]


def test_an_error_that_causes_itself_can_be_sent():
    error = caught(inner, ValueError("wrong"))
    error.__cause__ = KeyError(1)
    error.__cause__.__cause__ = error
    again = received(error)
    assert again.__cause__.args == (1,)
    assert again.__cause__.__cause__ is None
