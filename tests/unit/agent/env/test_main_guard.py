"""Test `backend="async"` in scripts with and without `if __name__ == "__main__"`."""

from __future__ import annotations

import ast

import pytest

from pytorchrl.agent.env.main_guard import is_guarded

HEAD = """
import pytorchrl
from pytorchrl.envs.testing import CountingEnv
open("imported", "a").write("x")

def main():
    agent = pytorchrl.train(
        "ppo", CountingEnv, target_steps=16, num_envs=1, num_steps=8, backend="async", progress=False, seed=1)
    print("trained", agent.summary["env_steps"])

"""


@pytest.mark.every(2)
@pytest.mark.parametrize("call", ["main()", "for _ in range(1):\n    main()", "with open('imported'):\n    main()"])
def test_a_script_without_guard_is_refused_before_any_process_starts(run_forked, tmp_path, call):
    script = tmp_path / "script.py"
    script.write_text(HEAD + call)
    result = run_forked(script)
    assert result.returncode == 1
    line = HEAD.count("\n") + call.count("\n") + 1
    message = result.stderr.splitlines()[-1]
    assert ("ConfigError: backend='async' starts processes that import the script again, and "
            f"line {line} of {script}") in message
    assert 'if __name__ == "__main__":' in message
    assert (tmp_path / "imported").read_text() == "x"
    assert "trained" not in result.stdout


@pytest.mark.every(2)
@pytest.mark.parametrize("call", [
    'if __name__ == "__main__":\n    main()',
    'import multiprocessing\nif multiprocessing.current_process().name == "MainProcess":\n    main()',
    'try:\n    if __name__ == "__main__":\n        main()\nfinally:\n    pass',
    # This script does not train in the main thread; workers of a scheme may also run in other threads.
    'import threading\nif __name__ == "__main__":\n'
    '    thread = threading.Thread(target=main)\n    thread.start()\n    thread.join()'])
def test_a_script_with_guard_trains(run_forked, tmp_path, call):
    script = tmp_path / "script.py"
    script.write_text(HEAD + call)
    result = run_forked(script, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "trained 16\n"
    assert (tmp_path / "imported").read_text() == "xx"  # the process of the environment also imports the script


@pytest.mark.parametrize("arguments", [["-c", HEAD + "main()"], ["-m", "package"]], ids=["-c", "-m"])
def test_code_that_processes_do_not_import_needs_no_guard(run_forked, tmp_path, arguments):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(HEAD + "main()")
    result = run_forked(*arguments, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "trained 16\n"
    assert (tmp_path / "imported").read_text() == "x"


def test_a_script_that_can_no_longer_be_read_is_not_refused(run_forked, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom pytorchrl.agent.env.main_guard import check_main_guard\n"
        'if __name__ == "__main__":\n    os.remove(__file__)\n    check_main_guard("backend=\'async\'")\n'
        '    print("went on")\n')
    result = run_forked(script)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "went on\n"


def test_a_script_from_the_standard_input_is_refused(run_python, tmp_path):
    """A spawned process would look for a file called <stdin>."""
    result = run_python("-", input=HEAD + 'if __name__ == "__main__":\n    main()\n')
    assert result.returncode == 1
    assert "this script comes from the standard input (`python -`); save it in a file" in result.stderr.splitlines()[-1]
    assert (tmp_path / "imported").read_text() == "x"


@pytest.mark.parametrize(("text", "line", "expected"), [
    ('if __name__ == "__main__":\n    f()\n', 2, True),
    ('if __name__ == "__main__":\n    f()\n', 1, True),
    ('if __name__ == "__main__" and x:\n    f(\n 1)\n', 3, True),
    ('if x == "__main__":\n    f()\n', 2, False),
    ('if __name__ == "__main__":\n    pass\nf()\n', 3, False),
])
def test_lines_under_a_guard(text, line, expected):
    assert is_guarded(ast.parse(text), line) == expected
