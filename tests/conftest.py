"""What the tests share: a fake server, and the scripts run as a user runs them."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from subprocess import DEVNULL, PIPE

import pytest
import start
from fake_server import FakeServer

TESTS = pathlib.Path(__file__).parent
TOP = TESTS.parent
# Where the tests run in the background, Ctrl-C is ignored, and every script would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
HANG = 300  # seconds: only what hangs takes as long
FAST = {"prompt_ms": 0.02, "token_ms": 1.0}
STEPS = {
    "sse.py": "chunks.jsonl",
    "measure_ttft.py": "ttft.json",
    "measure_prefill.py": "prefill.json",
    "measure_cache.py": "cache.json",
    "measure_sentence.py": "sentence.json",
    "measure_cancel.py": "cancel.json",
}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(start.IMPORTED)
CUT, LATE = 2.0, 60.0  # seconds: step 7 in a test, which a busy machine must not hurry
PATIENT = """
import os, sys
script, cut, late = sys.argv[1:4]
sys.argv[:4] = [script]
sys.path[0] = os.path.dirname(script)
import measure_cancel
measure_cancel.CUT, measure_cancel.EARLY_CUT = float(cut), min(float(cut), 1.0)
measure_cancel.LATE = float(late)
measure_cancel.sse.run(measure_cancel.main)
"""
# What a busy machine earns: the words of the notes about time that the server's clock does not
# explain. Whether they are right is tested with a clock of the test's own, see test_borders.py.
EARNED = ("by the server's clock", "within 1 ms", "may have been idle")


def notes(err):
    """The notes on stderr, but for those that a busy machine earns."""
    lines = [line for line in err.splitlines() if line.startswith("note: ")]
    return [line for line in lines if not any(words in line for words in EARNED)]


class Lab:
    """A folder for the results, and a fake server per call of serve().

    Step 7 hangs up after `cut` seconds instead of the lab's; a close is late after `late` more.
    """

    def __init__(self, folder, pycache=None):
        self.folder, self.out = folder, folder / "out"
        self.fake, self.cut, self.late = None, CUT, LATE
        ours = ("VOICE_LLM_", "PYTHON")
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "VOICE_LLM_OUT": str(self.out),
            "VOICE_LLM_KB": str(TESTS / "kb"),
            "VOICE_LLM_TIMEOUT": "60",  # only what never ends reaches it
            "TMPDIR": str(folder),
            "PYTHONPYCACHEPREFIX": str(pycache or folder.parent / "pycache"),  # not the checkout
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",  # python3: this one
        }

    def serve(self, **options):
        self.close()
        self.fake = FakeServer(**{**FAST, **options}).__enter__()
        self.env["VOICE_LLM_URL"] = self.fake.url
        return self.fake

    def close(self):
        if self.fake:
            self.fake.__exit__()
            self.fake = None

    def patience(self, script):
        """The program in place of step 7, with its arguments."""
        return (PATIENT, str(TOP / script), str(self.cut), str(self.late))

    def start(self, *command, **popen):
        """Start a script of the suite; its streams are pipes."""
        script, *rest = command
        if script == "measure_cancel.py":
            command = (sys.executable, "-c", *self.patience(script), *rest)
        elif script.endswith(".py"):
            command = (sys.executable, str(TOP / script), *rest)
        popen = {"stdout": PIPE, "stderr": PIPE, "stdin": DEVNULL, **popen}
        process = subprocess.Popen(command, env=self.env, encoding="utf-8", **popen)
        process.script = script
        return process

    def run(self, *command, **popen):
        """Run a script to its end → the process, with .out, .err, .notes and .seconds."""
        begin = time.perf_counter()
        script, *rest = command
        special = {"LC_ALL", "PYTHONIOENCODING", "PYTHONUTF8"} & {*self.env}
        if popen or special or not script.endswith(".py"):
            return self.ended(self.start(*command, **popen), begin)
        out, err = (tempfile.mktemp(dir=self.folder) for _ in range(2))
        program = ""
        if script == "measure_cancel.py":
            program, *patience = self.patience(script)
            rest = [*patience, *rest]
        arguments = (str(TOP / script), rest, self.env, out, err, program)
        process = FORKS.Process(target=start.script, args=arguments)
        process.start()
        process.join(HANG)
        assert process.exitcode is not None, f"{command} hangs"
        found = types.SimpleNamespace(args=command, script=script, returncode=process.exitcode)
        found.out, found.err = (pathlib.Path(path).read_text("utf-8") for path in (out, err))
        return self.judged(found, begin)

    def ended(self, process, begin=0.0):
        process.out, process.err = process.communicate(timeout=HANG)
        return self.judged(process, begin)

    def judged(self, process, begin):
        process.seconds = time.perf_counter() - begin
        process.notes = notes(process.err or "")
        return process

    def run_ok(self, *command):
        """Run a script that has to succeed."""
        process = self.run(*command)
        assert process.returncode == 0, process.err
        return process

    def run_fails(self, *command, words=()):
        """Run a script that has to fail: status 1, a line with `words`, the files as they were."""
        before = self.files() or self.write_earlier()
        return self.failed(self.run(*command), before, words)

    def failed(self, process, before, words=()):
        """What must hold of a run that failed. `before`: the files before it."""
        assert process.returncode == 1, process.err
        assert "Traceback" not in process.err
        script = process.script if process.script.endswith(".py") else process.args[1]
        begin = f"{os.path.basename(script)}: "
        lines = [line for line in process.err.splitlines() if line.startswith(begin)]
        assert len(lines) == 1, process.err
        assert process.err.splitlines()[-1] == lines[0]
        assert all(c.isprintable() for c in lines[0])
        for word in words:
            assert word in lines[0], lines[0]
        assert "note:" not in process.err
        assert self.files() == before
        process.line = lines[0]
        return process

    def read(self, name):
        return json.loads((self.out / name).read_text("utf-8"))

    def files(self):
        found = self.out.iterdir() if self.out.is_dir() else ()
        return {path.name: path.read_bytes() for path in found}

    def write_earlier(self):
        """Put results of an earlier run into the folder → what is there now."""
        self.out.mkdir(parents=True, exist_ok=True)
        steps = "ttft prefill cache call sentence cancel cancel_prefill report health request"
        for name in [f"{step}.json" for step in steps.split()] + ["sse_raw.txt", "chunks.jsonl"]:
            (self.out / name).write_text(f"earlier {name}")
        props = self.fake.props() if self.fake else {}
        (self.out / "props.json").write_text(json.dumps(props))
        return self.files()


@contextlib.contextmanager
def reserved_port():
    """A port where nothing listens, and that no other test takes; a server that is told it may."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def eventually(condition, seconds=HANG):
    """Whether `condition` comes true, before what is waited for must have hung."""
    until = time.perf_counter() + seconds
    while not condition() and time.perf_counter() < until:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def lab(tmp_path, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()  # with xdist, one for each worker, in one for all
    lab = Lab(tmp_path, (base.parent if base.name.startswith("popen-") else base) / "pycache")
    yield lab
    lab.close()


def pytest_collection_modifyitems(items):
    """The longest tests first: several run at once, and none should be left over at the end."""
    items.sort(key=lambda item: "test_run_all" not in item.nodeid)
