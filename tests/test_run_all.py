"""run_all.sh: on a Pod, beside a server, and on a bare machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import TESTS, TOP, Lab, eventually

FILES = ["health", "props", "ttft", "prefill", "cache", "sentence", "cancel", "report"]
STUB = """#!/bin/sh
# voice-llm as the Pod has it, with the fake server in place of the real one
cd "{folder}" || exit 1
echo "$1" >>calls
case $1 in
  up)
    [ -e down ] && {{ echo "voice-llm: no model" >&2; exit 7; }}
    [ -e pid ] && exit 0
    "{python}" "{fake}" --port {port} --prompt-ms 0.05 --token-ms 3 --loading 0.5 --log server.log >/dev/null 2>&1 &
    echo $! >pid ;;
  log) cat server.log ;;
esac
"""


@pytest.fixture
def pod(lab, tmp_path):
    """A folder with a voice-llm that is first on PATH."""
    folder = tmp_path / "pod"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"folder": folder, "python": sys.executable, "fake": TESTS / "fake_server.py", "port": port}
    (folder / "voice-llm").write_text(STUB.format(**values))
    (folder / "voice-llm").chmod(0o755)
    lab.env["PATH"] = f"{folder}:{lab.env['PATH']}"
    lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
    yield folder
    if (folder / "pid").exists():
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


def make_bare(lab, folder):
    """Give the lab a PATH with python3 and the few tools of a bare machine, without voice-llm and without curl."""
    folder.mkdir()
    for tool in "bash", "dirname", "readlink", "mktemp", "rm", "mv", "cp", "sleep":
        (folder / tool).symlink_to(shutil.which(tool))
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)
    lab.env["PATH"] = str(folder)
    return folder


@pytest.fixture
def bare(lab, tmp_path):
    return make_bare(lab, tmp_path / "bin")


@pytest.fixture(scope="module", autouse=True)
def fake_run(tmp_path_factory):
    """A run with --fake on a bare machine. It takes its time, and the tests before the one that looks at it go on."""
    folder = tmp_path_factory.mktemp("fake")
    lab = Lab(folder)
    bare = make_bare(lab, folder / "bin")
    lab.env["VOICE_LLM_URL"] = "http://127.0.0.1:9"
    lab.env["VOICE_LLM_KB"] = "/nowhere"
    begin = time.time()
    process = lab.start(str(bare / "bash"), str(TOP / "run_all.sh"), "--fake")
    assert eventually(lambda: fake_of(process))
    yield lab, process, begin, fake_of(process)
    process.kill()


def test_on_the_pod_it_starts_the_server_and_does_all_eight_steps(lab, pod, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(TOP / "run_all.sh")
    process = lab.run(str(link), cwd=tmp_path)
    assert process.returncode == 0, process.err
    for number in range(1, 9):
        assert f"\n[{number}/8] " in process.out
    assert "voice-llm log has the server's 'cancel task'" in process.out
    assert (pod / "calls").read_text().splitlines()[0] == "up"
    for name in FILES:
        assert lab.read(f"{name}.json")
    assert lab.read("health.json") == {"status": "ok"}
    assert lab.read("props.json")["total_slots"] == 1
    assert (lab.out / "sse_raw.txt").read_bytes().rstrip().endswith(b"data: [DONE]")
    assert json.loads((lab.out / "chunks.jsonl").read_text().splitlines()[0])["text"]
    assert (lab.out / "sse.py").read_bytes() == (TOP / "sse.py").read_bytes()
    assert len(lab.files()) == len(FILES) + 3
    log = (pod / "server.log").read_text()
    assert log.count("cancel task") == 1

    # Again, with a delivered file that someone has changed, and a log with an old `cancel task` only.
    (lab.out / "sse.py").write_text("mine")
    stub = (pod / "voice-llm").read_text()
    (pod / "voice-llm").write_text(stub.replace("log) cat server.log", "log) echo 'stop: cancel task, id_task = 3'"))
    process = lab.run(str(TOP / "run_all.sh"), cwd=tmp_path)
    assert process.returncode == 0, process.err
    assert (lab.out / "sse.py").read_text() == "mine"
    assert "voice-llm log has no new 'cancel task'" in process.err


def test_the_first_step_that_fails_ends_the_run_is_named_and_gives_its_status(lab, pod, tmp_path):
    (pod / "down").touch()
    process = lab.run(str(TOP / "run_all.sh"))
    assert process.returncode == 7
    assert process.err.splitlines() == [
        "voice-llm: no model",
        "run_all.sh: step 1 (the server) failed with exit status 7",
    ]
    (pod / "down").unlink()
    lab.env["VOICE_LLM_KB"] = str(tmp_path / "nowhere")
    process = lab.run(str(TOP / "run_all.sh"))
    assert process.returncode == 1
    assert process.err.splitlines()[-1] == "run_all.sh: step 4 (prefill) failed with exit status 1"
    assert "[5/8]" not in process.out
    assert (lab.out / "ttft.json").exists()
    assert not (lab.out / "prefill.json").exists()


def test_beside_a_server_of_ones_own_it_needs_no_voice_llm_and_no_curl(lab, bare):
    lab.serve(token_ms=4)
    process = lab.run(str(bare / "bash"), str(TOP / "run_all.sh"))
    assert process.returncode == 0, process.err
    assert len(lab.files()) == len(FILES) + 3
    assert "cancel task" not in process.out + process.err


def test_with_neither_command_nor_server_it_names_the_two_ways_on_within_seconds(lab, bare):
    with socket.create_server(("127.0.0.1", 0)) as free:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{free.getsockname()[1]}"
    process = lab.run(str(bare / "bash"), str(TOP / "run_all.sh"))
    assert process.returncode == 1
    assert process.seconds < 8
    for words in "voice-llm", lab.env["VOICE_LLM_URL"], "llama-server -m", "-c 4096 -np 1 --cache-ram 0", "--fake":
        assert words in process.err
    assert "Traceback" not in process.err


def test_without_a_python_that_will_do_it_says_so(lab, bare):
    (bare / "python3").write_text("#!/bin/sh\nexit 1\n")
    process = lab.run(str(bare / "bash"), str(TOP / "run_all.sh"))
    assert process.returncode == 1
    assert process.err.splitlines() == ["run_all.sh: needs python3, version 3.9 or later, on PATH"]


def test_an_unknown_option_exits_with_2_and_help_with_0(lab):
    for options, status in (["--nonsense"], 2), (["--fake", "--fake"], 2), ([""], 2), (["--help"], 0):
        process = lab.run(str(TOP / "run_all.sh"), *options)
        assert process.returncode == status
        assert "--fake" in process.out + process.err or status == 2


def processes():
    """Every process of the machine: {its id: its parent's id and its command}."""
    listed = subprocess.run(
        ["ps", "-Aww", "-o", "pid=", "-o", "ppid=", "-o", "args="], capture_output=True, encoding="utf-8", check=True
    )
    return {
        int(pid): f"{ppid} {rest}" for pid, ppid, *rest in (line.split(None, 2) for line in listed.stdout.splitlines())
    }


def fake_of(process):
    """The ids of the fake servers that `process`, a run of run_all.sh, has started."""
    return {pid for pid, text in processes().items() if text.startswith(f"{process.pid} ") and "fake_server" in text}


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_fake_ends_its_server_however_the_run_ends(lab, signum, status):
    process = lab.start(str(TOP / "run_all.sh"), "--fake")
    assert eventually(lambda: (lab.out / "health.json").exists(), 20)
    [pid] = fake_of(process)
    begin = time.perf_counter()
    process.send_signal(signum)
    process.wait(10)
    assert time.perf_counter() - begin < 3
    assert process.returncode == status
    assert eventually(lambda: pid not in processes())
    process.communicate(timeout=20)
    assert eventually(lambda: not [name for name in lab.files() if name.endswith(".tmp")])


def test_fake_does_all_steps_on_a_bare_machine_in_under_20_seconds(fake_run):
    lab, process, begin, servers = fake_run
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.strip().splitlines()
    assert "SIMULATED" in lines[0]
    assert "SIMULATED" in lines[-1]
    assert "Where the time goes: simulated" in out
    assert len(lab.files()) == len(FILES) + 3
    assert (lab.out / "report.json").stat().st_mtime - begin < 20
    assert len(servers) == 1
    assert eventually(lambda: not servers & set(processes()))
