"""Runs scripts of one process as forks of a process that has loaded MindSpore, which takes over a second each time.

run() does what jobs.run(jobs.PYTHON, ...) does: the real script, in a process of its own, with its own folder,
variables and exit code. There is one server for each worker of pytest; it ends with it.
"""

import functools
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import jobs

SERVER = """
import gc, json, os, runpy, sys
gc.disable()
import mindspore
gc.enable()
gc.freeze()

def become(folder, variables, log, words):
    os.setsid()
    os.chdir(folder)
    os.environ.update(variables)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, there in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(there, number)
    code, sys.argv = 0, words
    places = [place for place in variables.get("PYTHONPATH", "").split(":") if place]
    try:
        if words[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *words[2:]], ["", *places]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[:0] = [os.path.dirname(os.path.abspath(words[0])), *places]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(code)

sys.path.pop(0)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        become(*json.loads(line))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def server():
    """The process that has loaded MindSpore."""
    return subprocess.Popen([jobs.PYTHON, "-c", SERVER], env={**jobs.clean_environment(), "GLOG_v": "3"}, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1, start_new_session=True)


def run(*words, cwd, env=None, timeout=120):
    """Run a script with its options, or "-c" and code, to its end; return a jobs.Result."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        server().stdin.write(json.dumps([str(cwd), env or {}, log.name, [str(word) for word in words]]) + "\n")
        child = int(server().stdout.readline())
        limit = threading.Timer(jobs.PATIENCE * timeout, os.kill, (child, signal.SIGKILL))
        limit.start()
        code = int(server().stdout.readline())
        limit.cancel()
        result = jobs.Result(code, Path(log.name).read_text(errors="replace"), time.monotonic() - started, [])
    assert result.seconds < jobs.PATIENCE * timeout, f"still running after that: {words}\n{result.output}"
    return result


def refused(sentence, *command, cwd):
    """Assert that a command ends with exit code 2 and a sentence, and writes nothing."""
    before = sorted(path for path in cwd.rglob("*"))
    result = run(*command[1:], cwd=cwd) if command[0] == jobs.PYTHON else jobs.run(*command, cwd=cwd)
    assert result.code == 2, result.output
    assert re.search(sentence, result.output), result.output
    assert "Traceback" not in result.output
    assert sorted(path for path in cwd.rglob("*")) == before
