"""What the tests share: a fake server, and the scripts run as a user runs them."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from fake_server import FakeServer

TESTS = pathlib.Path(__file__).parent
TOP = TESTS.parent
# Where the tests run in the background, Ctrl-C is ignored, and every script would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
FAST = {"prompt_ms": 0.02, "token_ms": 1.0}
STEPS = {
    "sse.py": "chunks.jsonl",
    "measure_ttft.py": "ttft.json",
    "measure_prefill.py": "prefill.json",
    "measure_cache.py": "cache.json",
    "measure_sentence.py": "sentence.json",
    "measure_cancel.py": "cancel.json",
}


class Lab:
    """A folder for the results, and a fake server per call of serve()."""

    def __init__(self, folder):
        self.out = folder / "out"
        self.env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("VOICE_LLM_", "PYTHON"))
            },
            "VOICE_LLM_OUT": str(self.out),
            "VOICE_LLM_KB": str(TESTS / "kb"),
            "VOICE_LLM_TIMEOUT": "10",
            "TMPDIR": str(folder),
            "PYTHONPYCACHEPREFIX": str(
                folder.parent / "pycache"
            ),  # compiled once, and not into the checkout
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",  # python3 is this Python
        }
        self.fake = None

    def serve(self, **options):
        self.close()
        self.fake = FakeServer(**{**FAST, **options}).__enter__()
        self.env["VOICE_LLM_URL"] = self.fake.url
        return self.fake

    def close(self):
        if self.fake:
            self.fake.__exit__()
            self.fake = None

    def start(self, *command, **popen):
        """Start a script of the suite; its streams are pipes."""
        if command[0].endswith(".py"):
            command = (sys.executable, str(TOP / command[0]), *command[1:])
        streams = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
        }
        return subprocess.Popen(command, env=self.env, encoding="utf-8", **{**streams, **popen})

    def run(self, *command, **popen):
        """Run a script to its end → the process, with .out, .err and .seconds."""
        begin = time.perf_counter()
        process = self.start(*command, **popen)
        process.out, process.err = process.communicate(timeout=60)
        process.seconds = time.perf_counter() - begin
        return process

    def run_ok(self, *command):
        """Run a script that has to succeed."""
        process = self.run(*command)
        assert process.returncode == 0, process.err
        return process

    def run_fails(self, *command, words=()):
        """Run a script that has to fail: exit status 1, one line with `words`, no traceback, the files as they were."""
        before = self.files() or self.write_earlier()
        return self.failed(self.run(*command), before, words)

    def failed(self, process, before, words=()):
        """What must hold of a run that failed. `before`: the files before it."""
        assert process.returncode == 1, process.err
        assert "Traceback" not in process.err
        script = os.path.basename(process.args[1])
        lines = [line for line in process.err.splitlines() if line.startswith(script + ": ")]
        assert len(lines) == 1, process.err
        assert process.err.splitlines()[-1] == lines[0]
        assert all(c.isprintable() for c in lines[0])
        for word in words:
            assert word in lines[0]
        assert "note:" not in process.err
        assert self.files() == before
        process.line = lines[0]
        return process

    def read(self, name):
        return json.loads((self.out / name).read_text("utf-8"))

    def files(self):
        return (
            {path.name: path.read_bytes() for path in self.out.iterdir()}
            if self.out.is_dir()
            else {}
        )

    def write_earlier(self):
        """Put results of an earlier run into the folder → what is there now."""
        self.out.mkdir(parents=True, exist_ok=True)
        for step in (
            "ttft",
            "prefill",
            "cache",
            "sentence",
            "cancel",
            "cancel_prefill",
            "report",
            "health",
            "props",
        ):
            (self.out / f"{step}.json").write_text(f"earlier {step}")
        (self.out / "sse_raw.txt").write_text("earlier raw")
        (self.out / "chunks.jsonl").write_text("earlier chunks")
        return self.files()


@contextlib.contextmanager
def reserved_port():
    """A port at which nothing listens, and that no test beside this one takes; a server that is told it may have it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def eventually(condition, seconds=10):
    """Whether `condition` comes true in time."""
    until = time.perf_counter() + seconds
    while not condition() and time.perf_counter() < until:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def pytest_collection_modifyitems(items):
    """The longest tests first: several run at once, and none should be left over at the end."""
    items.sort(key=lambda item: "test_run_all" not in item.nodeid)
