"""run_all.sh: on a Pod, beside a server, and on a bare machine; many runs; Ctrl-C."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import TESTS, TOP, eventually, reserved_port

RUN = str(TOP / "run_all.sh")
PATIENCE = r"\1 = 1.2, 1.0, 60.0"
FILES = {"health", "props", "request", "ttft", "prefill", "cache", "sentence", "cancel", "report"}
DELIVERED = {*(f"{name}.json" for name in FILES), "sse_raw.txt", "chunks.jsonl", "sse.py"}
STEPS = ("ttft", "prefill", "cache", "sentence", "cancel")
SCRIPTS = [*(f"measure_{step}.py" for step in STEPS), "report.py"]
MORE = [
    *SCRIPTS[:2],
    *(f"measure_cache.py {option}" for option in ("--changed-suffix", "--call")),
    *(SCRIPTS[3], "measure_cancel.py", "measure_cancel.py --during-prefill", "report.py"),
]
STUB = """#!/bin/sh
# voice-llm as the Pod has it, with the fake server in place of the real one
cd "{folder}" || exit 1
echo "$1" >>calls
case $1 in
  up)
    [ -e pid ] && exit 0
    "{python}" "{fake}" --port {port} --prompt-ms 2 --token-ms 10 --loading 0.5 \\
      --log server.log >/dev/null 2>&1 &
    echo $! >pid ;;
  log) cat server.log ;;
esac
"""
STEP = """# writes down how it was called, and then does what the test wants it to do
import json, os, pathlib, sys

here, name = pathlib.Path(__file__).parent, " ".join([os.path.basename(__file__), *sys.argv[1:]])
out, system = os.environ["VOICE_LLM_OUT"], os.environ.get("VOICE_LLM_SYSTEM")
code = json.loads((here / "plan").read_text()).get(name)
if "--check" not in sys.argv:
    with open(here / "calls", "a") as calls:
        print(json.dumps([name, out, system]), file=calls)
    print("at work:", name, flush=True)
if code:
    import signal, time, sse
    sse.run(lambda: exec(code))
"""


class House:
    """A copy of the suite in which steps 3 to 8 are a STEP: what is left is run_all.sh's own.

    With real steps, a busy machine does not hurry step 7, as in conftest.PATIENT.
    """

    def __init__(self, folder, real=False):
        self.folder, self.run = folder, str(folder / "run_all.sh")
        folder.mkdir()
        (folder / "tests").symlink_to(TESTS)
        for path in TOP.glob("[!.]*.??"):
            shutil.copy(path, folder / path.name)
        cancel = folder / "measure_cancel.py"
        patient, number = re.subn("(?m)^(CUT, EARLY_CUT, LATE) = .*", PATIENCE, cancel.read_text())
        assert number == 1
        cancel.write_text(patient)
        for name in () if real else SCRIPTS:
            (folder / name).write_text(STEP)
        self.plan({})

    def plan(self, code):
        """What the steps do: {script and options: Python}."""
        (self.folder / "plan").write_text(json.dumps(code))

    def calls(self):
        """The calls since the last time: [script and options, VOICE_LLM_OUT, VOICE_LLM_SYSTEM]."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.write_text("")
        return [json.loads(line) for line in lines]

    def names(self):
        return [name for name, _, _ in self.calls()]


def left_over(session):
    """The commands that a session still runs; one that only waits to be reaped does not run."""
    command = ["ps", "-ww", "-o", "args=", "-s", str(session)]
    listed = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    return [line for line in listed.stdout.splitlines() if "<defunct>" not in line]


def did_all(process):
    """Whether all steps succeeded. Where a machine is busy enough, a check of the report fails."""
    said = [line for line in process.err.splitlines() if line.startswith("run_all.sh: ")]
    return process.returncode == 0 or all(": step 8 (report" in line for line in said)


@pytest.fixture
def house(tmp_path):
    return House(tmp_path / "house")


@pytest.fixture
def suite(tmp_path):
    return House(tmp_path / "suite", real=True)


@pytest.fixture
def pod(lab, tmp_path):
    """A folder with a voice-llm that is first on PATH."""
    folder = tmp_path / "pod"
    folder.mkdir()
    with reserved_port() as port:
        values = {"python": sys.executable, "fake": TESTS / "fake_server.py", "port": port}
        (folder / "voice-llm").write_text(STUB.format(folder=folder, **values))
        (folder / "voice-llm").chmod(0o755)
        lab.env["PATH"] = f"{folder}:{lab.env['PATH']}"
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
        yield folder
    if (folder / "pid").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


@pytest.fixture
def bare(lab, tmp_path):
    """A PATH with what a bare machine has: no voice-llm, no curl, no timeout → the folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in "sh", "bash", "readlink", "mktemp", "rm", "sleep":
        (folder / tool).symlink_to(shutil.which(tool))
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)
    lab.env["PATH"] = str(folder)
    return folder


# ---------------------------------------------------------------------------- on the Pod


def test_on_the_pod_it_starts_the_server_and_does_all_steps(lab, pod, suite, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(suite.run)
    process = lab.run(str(link), "--more", cwd=tmp_path)
    assert did_all(process), process.err
    headings = re.findall(r"^\[(\d)/8\] (.*)", process.out, re.MULTILINE)
    assert [number for number, _ in headings] == list("1234556778")
    assert len({what for _, what in headings}) == 10
    assert "voice-llm log has the server's 'cancel task'" in process.out
    assert (pod / "calls").read_text().splitlines()[0] == "up"
    assert set(lab.files()) == DELIVERED | {"call.json", "cancel_prefill.json"}
    assert (lab.out / "sse.py").read_bytes() == (TOP / "sse.py").read_bytes()
    assert "changed_suffix" in lab.read("cache.json")
    report = process.out.partition("[8/8] report\n")[2].splitlines()
    assert report[0].startswith("Where the time goes")
    assert "".join(report[-1].split()).endswith("report.json")

    # Again, and one step is void: its figures are those of the run before, so nobody sees them.
    before = lab.files()
    for name in SCRIPTS[:-1]:
        script, status = suite.folder / name, 3 * (name == "measure_sentence.py")
        at_once = f"main():\n    raise SystemExit({status})"
        script.write_text(script.read_text().replace("main():", at_once))
    process = lab.run(suite.run)
    assert process.returncode == 3
    assert "sentence.json" in process.err
    assert "measure_sentence.py" in process.err.splitlines()[-1]
    shown = process.out.partition("[8/8]")[2]
    assert "\nwhole answer" in shown
    assert "\nfirst sentence" not in shown
    assert lab.files()["report.json"] == before["report.json"]


def test_a_server_that_answers_is_used_and_an_old_cancel_says_nothing(lab, pod, house):
    (pod / "server.log").write_text("cancel task\n")
    lab.serve()
    process = lab.run(house.run)
    assert (process.returncode, process.err.count("run_all.sh")) == (0, 0), process.err
    assert house.names() == SCRIPTS
    assert set((pod / "calls").read_text().split()) <= {"log"}
    assert "voice-llm log" not in process.out
    assert "== run" not in process.out


@pytest.mark.parametrize("tools", [["timeout"], []])
def test_a_log_that_is_followed_for_ever_is_left(lab, pod, house, bare, tools):
    if tools and not shutil.which("timeout"):
        tools = []  # as on macOS
    (pod / "server.log").write_text("a line\n")
    stub = (pod / "voice-llm").read_text().replace("cat server.log", "tail -f -n +1 server.log")
    (pod / "voice-llm").write_text(stub)
    for tool in "tail", *tools:
        (bare / tool).symlink_to(shutil.which(tool))
    lab.env["PATH"] = f"{pod}:{bare}"
    lab.serve()
    process = lab.run(house.run, start_new_session=True)
    assert process.returncode == 0, process.err
    assert house.names() == SCRIPTS
    assert (pod / "calls").exists() == bool(tools)
    assert eventually(lambda: not left_over(process.pid)), left_over(process.pid)


def test_where_step_1_fails_the_run_ends_with_its_status(lab, pod, house):
    (pod / "voice-llm").write_text('#!/bin/sh\necho "voice-llm: no model" >&2; exit 7\n')
    process = lab.run(house.run)
    assert process.returncode == 7
    assert process.err.splitlines() == [
        "voice-llm: no model",
        "run_all.sh: step 1 (the server) failed with exit status 7",
    ]
    assert house.calls() == []


# ---------------------------------------------------------------------------- a step that is void


def test_a_void_step_does_not_end_the_run(lab, house):
    lab.serve()
    lab.env["VOICE_LLM_TIMEOUT"] = "60.5"
    house.plan({"measure_ttft.py": "sys.exit(3)", "measure_cache.py --call": "sys.exit(4)"})
    process = lab.run(house.run, "--more")
    assert process.returncode == 3
    assert house.names() == [*MORE[:-1], "report.py --without ttft,call"]
    failed, void, missing = process.err.splitlines()[-3:]
    assert failed == "run_all.sh: step 3 (time to first token) failed with exit status 3"
    assert void.startswith("run_all.sh: step 5 (a call of six turns) failed")
    assert "measure_ttft.py" in missing
    assert "measure_cache.py --call" in missing
    assert "measure_prefill.py" not in missing

    house.plan({"report.py": "sys.exit(1)"})  # a check that FAILS
    process = lab.run(house.run)
    assert process.returncode == 1
    assert house.names() == SCRIPTS
    assert process.err.splitlines()[-1].startswith("run_all.sh: step 8 (report) failed")


def test_the_steps_after_a_hang_or_a_crash_of_the_server_are_left_out(lab, house, pod):
    left_out = "the steps after it are left out"
    kill = f"os.kill(int(open({str(pod / 'pid')!r}).read()), signal.SIGKILL); sys.exit(5)"
    house.plan({"measure_prefill.py": kill})
    process = lab.run(house.run)
    assert process.returncode == 5
    without = "report.py --without prefill,cache,sentence,cancel"
    assert house.names() == ["measure_ttft.py", "measure_prefill.py", without]
    assert "[5/8]" not in process.out
    assert left_out in process.err
    for script in SCRIPTS[1:-1]:
        assert script in process.err.splitlines()[-1]

    lab.env["VOICE_LLM_TIMEOUT"] = "3"
    lab.serve(fault="silence")
    process = lab.run(house.run)
    assert process.returncode == 1
    assert house.names() == ["report.py --without request,ttft,prefill,cache,sentence,cancel"]
    assert left_out in process.err


# ---------------------------------------------------------------------------- before step 1


def test_documents_and_prompts_are_checked_before_anything_is_asked(lab, pod, tmp_path):
    def fails(word, *options):
        process = lab.run(RUN, *options)
        assert process.returncode == 1
        assert word in process.err.splitlines()[0]
        assert process.err.splitlines()[-1] == "run_all.sh: nothing was measured"
        assert "[1/8]" not in process.out
        assert not (pod / "calls").exists()
        assert not lab.out.exists()

    (tmp_path / "prompt.txt").write_text("You answer the phone.")
    fails("nowhere.txt", "--compare", str(tmp_path / "prompt.txt"), str(tmp_path / "nowhere.txt"))
    lab.env["VOICE_LLM_KB"] = str(tmp_path / "nowhere")
    fails("VOICE_LLM_KB")


def test_the_results_of_other_runs_are_never_mixed_with_those_of_many(lab, house):
    lab.serve()
    for taken, options in (
        ("old", ["--compare", "a", "b"]),
        ("new", ["--compare", "a", "b", "--repeat", "2"]),
        ("1", ["--repeat", "2"]),
        ("ttft.json", ["--repeat", "2"]),
    ):
        (lab.out / taken).mkdir(parents=True)
        process = lab.run(house.run, *options)
        assert process.returncode == 1
        [line] = process.err.splitlines()
        assert str(lab.out / taken) in line
        assert "VOICE_LLM_OUT" in line
        assert house.calls() == []
        (lab.out / taken).rmdir()


def test_a_wrong_option_exits_with_2_and_help_with_0(lab):
    for options, word in (
        (["--nonsense"], "unknown option '--nonsense'"),
        ([""], "unknown option ''"),
        (["--repeat"], "--repeat"),
        (["--repeat", "0"], "--repeat"),
        (["--repeat", "2.5"], "--repeat"),
        (["--compare", "one.txt"], "two files"),
        (["--compare", "one.txt", " "], "two files"),
    ):
        process = lab.run(RUN, *options)
        assert process.returncode == 2
        assert process.out == ""
        assert word in process.err.splitlines()[0]
        assert process.err.splitlines()[1].startswith("usage: ")
    process = lab.run(RUN, "--help")
    assert (process.returncode, process.err) == (0, "")
    for option in "--fake", "--more", "--repeat", "--compare":
        assert option in process.out
    assert max(map(len, process.out.splitlines())) <= 80


def test_a_system_prompt_of_ones_own_is_named_and_a_blank_one_is_not(lab, house):
    lab.serve()
    (house.folder / "prompt.txt").write_text("You answer the phone.")
    for value, named in ("prompt.txt", True), (" ", False):
        lab.env["VOICE_LLM_SYSTEM"] = value
        process = lab.run(house.run, cwd=house.folder)
        assert process.returncode == 0, process.err
        assert ("system prompt: prompt.txt" in process.out) == named
        asked = lab.fake.requests[-1]["messages"][0]["content"]
        assert (asked == "You answer the phone.") == named


# ---------------------------------------------------------------------------- a bare machine


def test_fake_does_all_steps_on_a_bare_machine_started_with_sh(lab, bare, suite):
    lab.env.update(VOICE_LLM_URL="https://elsewhere", VOICE_LLM_KB="none", PYTHONSAFEPATH="1")
    process = lab.run(str(bare / "sh"), suite.run, "--fake", start_new_session=True)
    assert did_all(process), process.err
    lines = process.out.strip().splitlines()
    assert "SIMULATED" in lines[0]
    assert "SIMULATED" in lines[-1]
    assert "Where the time goes: simulated" in process.out
    assert set(lab.files()) == DELIVERED
    assert [row["docs"] for row in lab.read("prefill.json")] == [0]
    assert not re.search("^FAILS .*(tokens|documents|starts with)", process.out, re.MULTILINE)
    assert eventually(lambda: not left_over(process.pid))
    assert not list(pathlib.Path(lab.env["TMPDIR"]).glob("voice-llm.*"))


def test_fake_goes_into_a_folder_of_its_own_where_none_is_set(lab, suite):
    lab.env["VOICE_LLM_KB"] = "/nowhere"  # it has its own documents, too
    for blank in None, " ":
        lab.env.pop("VOICE_LLM_OUT") if blank is None else lab.env.update(VOICE_LLM_OUT=blank)
        with stopped(lab, suite.run, "--fake", at="Results go to") as process:
            process.terminate()
        assert f"Results go to {suite.folder / 'fake-results'}.\n" in process.out
    assert "/fake-results/" in (TOP / ".gitignore").read_text().split()


def test_a_fake_server_that_does_not_start_is_no_hang(lab, house):
    (house.folder / "tests").unlink()
    process = lab.run(house.run, "--fake")
    assert process.returncode == 1
    assert process.err.splitlines()[-1] == "run_all.sh: the fake server did not start"


def test_with_neither_command_nor_server_it_names_the_two_ways_on(lab, bare):
    for documents in str(TESTS / "kb"), "/nowhere":  # a newcomer has no documents either
        lab.env["VOICE_LLM_KB"] = documents
        with reserved_port() as port:
            lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
            process = lab.run(RUN)
        assert process.returncode == 1
        for words in "voice-llm", lab.env["VOICE_LLM_URL"], "--cache-ram 0", "tests/kb", "--fake":
            assert words in process.err


def test_without_a_python_that_will_do_it_says_so(lab, bare):
    (bare / "python3").write_text("#!/bin/sh\nexit 1\n")
    process = lab.run(RUN)
    assert process.err.splitlines() == ["run_all.sh: needs python3, version 3.9 or later, on PATH"]


# ---------------------------------------------------------------------------- many runs


def test_compare_runs_two_prompts_in_turn_and_in_changing_order(lab, house):
    lab.serve()
    for name in "a.txt", "b.txt":
        (house.folder / name).write_text(name)
    house.plan({"measure_cancel.py": "sys.exit(3 if out.endswith('old/1') else 0)"})
    options = ["--compare", "a.txt", "b.txt", "--repeat", "2", "--more"]
    process = lab.run(house.run, *options, cwd=house.folder)
    assert process.returncode == 3
    calls = house.calls()
    folders = ("old/1", "a.txt"), ("new/1", "b.txt"), ("new/2", "b.txt"), ("old/2", "a.txt")
    for number, (folder, prompt) in enumerate(folders):
        of_run = calls[8 * number : 8 * (number + 1)]
        assert {tuple(call[1:]) for call in of_run} == {(str(lab.out / folder), prompt)}
        assert lab.fake.requests[number]["messages"][0]["content"] == prompt
        void = " --without cancel" if number == 0 else ""
        assert [name for name, _, _ in of_run] == [*MORE[:-1], f"report.py{void}"]
    comparison = [f"report.py --against {lab.out / 'old'}", str(lab.out / "new")]
    assert [call[:2] for call in calls[32:]] == [comparison]
    first, *others = re.findall(r"^== run (\d of 4 \(.*)", process.out, re.MULTILINE)
    assert first == "1 of 4 (old: a.txt)"
    for run, other in zip(("2 of 4 (new: b", "3 of 4 (new: b", "4 of 4 (old: a"), others):
        assert re.fullmatch(rf"{re.escape(run)}.txt\); about \d+ min \d+ s left", other)
    assert process.out.rstrip().endswith(f"at work: {comparison[0]}")


def test_repeat_alone_makes_a_folder_for_each_run_and_one_report(lab, house):
    process = lab.run(house.run, "--fake", "--repeat", "2")
    assert process.returncode == 0, process.err
    calls = house.calls()
    assert [name for name, _, _ in calls] == [*SCRIPTS, *SCRIPTS, "report.py"]
    assert [out for _, out, _ in calls[5::6]] == [str(lab.out / "1"), str(lab.out / "2")]
    assert calls[-1][1] == str(lab.out)
    assert (lab.out / "2" / "chunks.jsonl").exists()
    assert "== run 2 of 2; about " in process.out
    assert "SIMULATED" in process.out.rstrip().splitlines()[-1]


@pytest.mark.parametrize("runs", range(3))
def test_ctrl_c_among_many_runs_says_how_to_see_what_is_finished(lab, house, runs):
    lab.serve()
    (house.folder / "prompt.txt").write_text("You answer the phone.")
    lab.env["VOICE_LLM_OUT"] = str(house.folder / "a folder")
    side = ("old", "new", "new")[runs]
    here = f"{side}/{1 + runs // 2}"
    house.plan({"measure_ttft.py": f"out.endswith({here!r}) and time.sleep(3600)"})
    command = [house.run, "--compare", "prompt.txt", "prompt.txt"]
    moment = {"at": "at work: measure_ttft.py", "times": runs + 1}
    with stopped(lab, *command, **moment, cwd=house.folder) as process:
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    lines = [line for line in process.err.splitlines() if line.startswith("run_all.sh: ")]
    where = f"step 3 of run {runs + 1} of 10 ({side}: prompt.txt)"
    assert lines[0].startswith(f"run_all.sh: stopped in {where}")
    assert lines[-1] == process.err.splitlines()[-1]
    assert len(lines) == (1 if runs == 0 else 2)
    if runs:
        house.calls()
        assert lab.run("bash", "-c", lines[-1].partition("finished: ")[2]).returncode == 0
        old, new = (str(house.folder / "a folder" / name) for name in ("old", "new"))
        shown = ["report.py", old] if runs == 1 else [f"report.py --against {old}", new]
        assert [call[:2] for call in house.calls()] == [shown]


# ---------------------------------------------------------------------------- signals


@contextlib.contextmanager
def stopped(lab, *command, at, times=1, **popen):
    """Start a command, and wait until a line of its stdout has begun with `at`, `times` times. On
    leaving, wait until it has ended: then it has .out and .err, and nothing of it may be left."""
    folder = pathlib.Path(lab.env["TMPDIR"])
    with open(folder / "err", "w+", encoding="utf-8") as err:
        process = lab.start(*command, stderr=err, start_new_session=True, **popen)
        try:
            process.out = ""
            for line in process.stdout:
                process.out += line
                times -= line.startswith(at)
                if not times:
                    break
            assert not times, (folder / "err").read_text()
            yield process
            assert eventually(lambda: process.poll() is not None), left_over(process.pid)
            assert eventually(lambda: not left_over(process.pid)), left_over(process.pid)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.out += process.stdout.read()
        process.wait()
        err.seek(0)
        process.err = err.read()
    assert not list(lab.out.glob("*.tmp"))
    assert not list(folder.glob("voice-llm.*"))


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["TERM", "KILL"]
)
def test_fake_ends_its_server_however_the_run_ends(lab, house, signum, status):
    with stopped(lab, house.run, "--fake", at="[1/8]") as process:
        assert [line for line in left_over(process.pid) if "fake_server" in line]
        process.send_signal(signum)
    assert process.returncode == status


def test_a_signal_that_a_job_has_missed_is_sent_again(lab, house):
    """As a job misses it that has not become its command yet: too short a moment for a test."""
    deaf = 'kill() { if [ -z "${missed-}" ]; then missed=yes; else builtin kill "$@"; fi; }'
    (house.folder / "deaf").write_text(deaf)
    lab.env["BASH_ENV"] = str(house.folder / "deaf")
    house.plan({"measure_ttft.py": "time.sleep(3600)"})
    lab.serve()
    with stopped(lab, house.run, at="at work: measure_ttft.py") as process:
        process.terminate()
    assert process.returncode == 143


MOMENTS = [
    "SIMULATED",  # the fake server is starting
    "[1/8]",  # a step is starting: its job may not have become its command yet
    "[3/8]",
    "at work: measure_ttft.py",
    "at work: report.py",
]


# Each moment with the two ways that differ most, and the other two at one that is long enough.
CTRL_C = [(at, way) for at in MOMENTS for way in ("to the script alone", "by timeout")]
CTRL_C += [(MOMENTS[3], "to the group"), (MOMENTS[3], "to both")]


@pytest.mark.parametrize(("at", "way"), CTRL_C)
def test_ctrl_c_exits_with_130_says_where_and_leaves_nothing(lab, house, at, way):
    house.plan({at.partition("work: ")[2]: "time.sleep(3600)"})
    timeout = ["timeout", "--preserve-status", "-s", "INT", "3600"] if way == "by timeout" else []
    if not shutil.which("timeout"):
        timeout = []  # as on macOS; what it does is the same as "to both"
    with stopped(lab, *timeout, house.run, "--fake", at=at) as process:
        if timeout:
            process.send_signal(signal.SIGALRM)  # its time is up
        else:
            if way != "to the group":
                process.send_signal(signal.SIGINT)
            if way != "to the script alone":
                os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == 130, process.err
    assert "rror" not in process.err
    assert "line" not in process.err  # as in the messages of bash
    said = [line for line in process.err.splitlines() if "run_all.sh" in line]
    number = {"[1/8]": 1, "[3/8]": 3, MOMENTS[3]: 3, MOMENTS[4]: 8}.get(at)
    assert len(said) <= 1
    if number:
        assert said[0].startswith(f"run_all.sh: stopped in step {number}; "), process.err


# ---------------------------------------------------------------------------- the README's command


def test_the_readmes_command_compares_two_prompts(lab, house):
    section = (TOP / "README.md").read_text("utf-8").partition("## You have a slow prompt")[2]
    [command] = re.findall(r"^    (.*--compare prompt.txt shorter.txt.*)$", section, re.MULTILINE)
    for name in "prompt.txt", "shorter.txt":
        (house.folder / name).write_text("You answer the phone of a clinic.")
    process = lab.run("bash", "-c", f"{command} --repeat 1 --fake", cwd=house.folder)
    assert process.returncode == 0, process.err
    assert house.names() == [*SCRIPTS, *SCRIPTS, f"report.py --against {lab.out / 'old'}"]
