"""Run a script as `python3 SCRIPT` does, but in a fork of a Python that has imported what the
scripts need of the standard library: that is most of the time of a start, and of the tests."""

import os
import runpy
import signal
import sys

IMPORTED = ["argparse", "concurrent.futures", "http.client", "json", "statistics", "tempfile"]


def script(path, arguments, env, out, err, program=""):
    """Run the script at `path`, or `program` in its place; `out` and `err` are files."""
    os.environ.clear()
    os.environ.update(env)
    sys.pycache_prefix = env["PYTHONPYCACHEPREFIX"]
    for number, name in enumerate((os.devnull, out, err)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    if program:
        exec(program, {"__name__": "__main__"})
    else:
        runpy.run_path(path, run_name="__main__")
