"""run_all.sh: on a Pod, beside a server, and on a bare machine."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import TESTS, TOP, eventually, reserved_port

RUN = str(TOP / "run_all.sh")
FILES = {"health", "props", "ttft", "prefill", "cache", "sentence", "cancel", "report"}
DELIVERED = {*(f"{name}.json" for name in FILES), "sse_raw.txt", "chunks.jsonl", "sse.py"}
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
    with reserved_port() as port:
        values = {
            "folder": folder,
            "python": sys.executable,
            "fake": TESTS / "fake_server.py",
            "port": port,
        }
        (folder / "voice-llm").write_text(STUB.format(**values))
        (folder / "voice-llm").chmod(0o755)
        lab.env["PATH"] = f"{folder}:{lab.env['PATH']}"
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
        yield folder
    if (folder / "pid").exists():
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


@pytest.fixture
def bare(lab, tmp_path):
    """A PATH with python3 and the few tools of a bare machine, without voice-llm, curl and timeout → its bash."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in "bash", "dirname", "readlink", "mktemp", "rm", "cp", "sleep":
        (folder / tool).symlink_to(shutil.which(tool))
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)
    lab.env["PATH"] = str(folder)
    return str(folder / "bash")


# ---------------------------------------------------------------------------- on the Pod


def test_on_the_pod_it_starts_the_server_does_all_eight_steps_and_ends_with_the_report(
    lab, pod, tmp_path
):
    link = tmp_path / "link"
    link.symlink_to(TOP / "run_all.sh")
    process = lab.run(str(link), cwd=tmp_path)
    assert process.returncode == 0, process.err
    for number in range(1, 9):
        assert f"\n[{number}/8] " in process.out
    assert "voice-llm log has the server's 'cancel task'" in process.out
    assert (pod / "calls").read_text().splitlines()[0] == "up"
    assert lab.read("health.json") == {"status": "ok"}
    assert lab.read("props.json")["total_slots"] == 1
    assert (lab.out / "sse_raw.txt").read_bytes().rstrip().endswith(b"data: [DONE]")
    assert json.loads((lab.out / "chunks.jsonl").read_text().splitlines()[0])["text"]
    assert (lab.out / "sse.py").read_bytes() == (TOP / "sse.py").read_bytes()
    assert set(lab.files()) == DELIVERED
    assert (pod / "server.log").read_text().count("cancel task") == 1
    report = process.out.partition("[8/8] report\n")[2].splitlines()
    assert report[0].startswith("Where the time goes")
    assert "".join(report[-1].split()).endswith("report.json")

    # Again, with a delivered file that someone has changed. The server answers, so nobody starts it again, and its
    # log, which grew meanwhile, is judged.
    (lab.out / "sse.py").write_text("mine")
    (pod / "calls").unlink()
    stub = (pod / "voice-llm").read_text()
    (pod / "voice-llm").write_text(
        stub.replace("cat server.log", "sed 's/cancel task/gone/' server.log")
    )
    process = lab.run(RUN, cwd=tmp_path)
    assert process.returncode == 0, process.err
    assert (lab.out / "sse.py").read_text() == "mine"
    assert set((pod / "calls").read_text().split()) == {"log"}
    assert "voice-llm log has no new 'cancel task'" in process.err


def test_the_log_of_another_server_is_not_judged_and_its_server_is_not_started(lab, pod):
    stub = (pod / "voice-llm").read_text()
    (pod / "voice-llm").write_text(
        stub.replace("cat server.log", "echo 'stop: cancel task, id_task = 3'")
    )
    lab.serve(prompt_ms=0.1, token_ms=3)
    process = lab.run(RUN)
    assert process.returncode == 0, process.err
    assert "voice-llm log" not in process.out + process.err
    assert set((pod / "calls").read_text().split()) == {"log"}


def test_a_log_that_grows_but_whose_server_listens_on_another_port_is_not_judged(lab, pod):
    stub = (pod / "voice-llm").read_text()
    grows = "echo 'srv  llama_server: listening on http://127.0.0.1:1'; echo more >>more; cat more"
    (pod / "voice-llm").write_text(stub.replace("cat server.log", grows))
    lab.serve(prompt_ms=0.1, token_ms=3)
    process = lab.run(RUN)
    assert process.returncode == 0, process.err
    assert len((pod / "more").read_text().splitlines()) == 2
    assert "voice-llm log" not in process.out + process.err


def test_a_log_that_is_followed_for_ever_is_left(lab, pod):
    stub = (pod / "voice-llm").read_text()
    (pod / "voice-llm").write_text(stub.replace("cat server.log", "tail -f -n +1 server.log"))
    process = lab.run(RUN)
    assert process.returncode == 0, process.err
    assert "voice-llm log has the server's 'cancel task'" in process.out


def test_the_first_step_that_fails_ends_the_run_is_named_and_gives_its_status(lab, pod):
    (pod / "down").touch()
    process = lab.run(RUN)
    assert process.returncode == 7
    assert process.err.splitlines() == [
        "voice-llm: no model",
        "run_all.sh: step 1 (the server) failed with exit status 7",
    ]
    (pod / "down").unlink()
    lab.serve(fault="no_timings")
    process = lab.run(RUN)
    assert process.returncode == 1
    assert (
        process.err.splitlines()[-1]
        == "run_all.sh: step 3 (time to first token) failed with exit status 1"
    )
    assert "[4/8]" not in process.out
    assert (lab.out / "chunks.jsonl").exists()
    assert not (lab.out / "ttft.json").exists()


# ---------------------------------------------------------------------------- before step 1


def test_the_documents_and_the_prompt_are_checked_before_anything_is_asked_or_started(
    lab, pod, tmp_path
):
    def run(word):
        process = lab.run(RUN)
        assert process.returncode == 1
        assert word in process.err.splitlines()[0]
        assert process.err.splitlines()[-1] == "run_all.sh: nothing was measured"
        assert "[1/8]" not in process.out
        assert not (pod / "calls").exists()
        assert not lab.out.exists()

    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / "a.md").write_bytes(b"\xff")
    lab.env["VOICE_LLM_KB"] = str(tmp_path / "kb")
    run("not UTF-8")
    (tmp_path / "kb" / "a.md").write_bytes(b"one")
    run("1 document in")
    lab.env["VOICE_LLM_KB"] = str(tmp_path / "nowhere")
    run("VOICE_LLM_KB")
    lab.env["VOICE_LLM_KB"] = str(TESTS / "kb")
    lab.env["VOICE_LLM_SYSTEM"] = str(tmp_path / "prompt.txt")
    run("VOICE_LLM_SYSTEM")


def test_fake_never_touches_results_that_are_not_the_fakes(lab):
    lab.write_earlier()
    for left in set(lab.files()), {"props.json"}, {"ttft.json"}, {"cancel_prefill.json"}:
        for name in set(lab.files()) - left:
            (lab.out / name).unlink()
        for name in left:
            (lab.out / name).write_text("real")
        before = lab.files()
        process = lab.run(RUN, "--fake")
        assert process.returncode == 1
        assert process.err.splitlines()[-1].startswith(
            f"run_all.sh: {lab.out} holds results that are not simulated"
        )
        assert "VOICE_LLM_OUT" in process.err
        assert lab.files() == before


def test_a_real_run_does_not_mix_with_simulated_files_and_a_second_fake_run_may(lab):
    fake = lab.serve(prompt_ms=0.1, token_ms=3)
    lab.run_ok("sse.py", "--server")  # leaves what --fake would
    before = lab.files()
    real = fake.props()
    fake.props = lambda: {**real, "model_path": "/models/a.gguf"}
    process = lab.run(RUN)
    assert process.returncode == 1
    assert process.err.splitlines() == [
        f"run_all.sh: {lab.out} holds simulated results: set VOICE_LLM_OUT to another folder, or remove them"
    ]
    assert process.out == ""
    assert fake.requests == []
    assert lab.files() == before
    del lab.env["VOICE_LLM_URL"]
    process = lab.start(RUN, "--fake")
    assert eventually(lambda: (lab.out / "chunks.jsonl").exists(), 30)
    process.terminate()
    process.communicate(timeout=20)


# ---------------------------------------------------------------------------- beside a server, on a bare machine


def test_beside_a_server_of_ones_own_it_needs_no_voice_llm_and_no_curl(lab, bare):
    lab.serve(prompt_ms=0.1, token_ms=4)
    process = lab.run(bare, RUN)
    assert process.returncode == 0, process.err
    assert set(lab.files()) == DELIVERED
    assert "cancel task" not in process.out + process.err


def test_with_neither_command_nor_server_it_names_the_two_ways_on_within_seconds(lab, bare):
    for documents in str(TESTS / "kb"), "/nowhere":  # a newcomer has no documents either
        lab.env["VOICE_LLM_KB"] = documents
        with reserved_port() as port:
            lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
            process = lab.run(bare, RUN)
        assert process.returncode == 1
        assert process.seconds < 15
        for words in (
            "voice-llm",
            lab.env["VOICE_LLM_URL"],
            "-c 4096 -np 1 --cache-ram 0",
            "tests/kb",
            "--fake",
        ):
            assert words in process.err
        assert "Traceback" not in process.err


def test_without_a_python_that_will_do_it_says_so(lab, bare):
    (pathlib.Path(bare).parent / "python3").write_text("#!/bin/sh\nexit 1\n")
    process = lab.run(bare, RUN)
    assert process.returncode == 1
    assert process.err.splitlines() == ["run_all.sh: needs python3, version 3.9 or later, on PATH"]


def test_a_system_prompt_of_ones_own_is_named_and_one_that_is_blank_is_not(lab, tmp_path):
    (tmp_path / "prompt.txt").write_text("You answer the phone.")
    for value, named in (str(tmp_path / "prompt.txt"), True), (" ", False):
        lab.env["VOICE_LLM_SYSTEM"] = value
        lab.serve(fault="silence")
        process = lab.start(RUN)
        assert eventually(lambda: lab.fake.requests)
        process.terminate()
        assert ("system prompt: " in process.communicate(timeout=20)[0]) == named


def test_an_unknown_option_exits_with_2_and_help_with_0(lab):
    for options, status in (
        (["--nonsense"], 2),
        (["--fake", "--fake"], 2),
        ([""], 2),
        (["--help"], 0),
    ):
        process = lab.run(RUN, *options)
        assert process.returncode == status
        assert "--fake" in process.out + process.err
        assert "--more" in process.out + process.err
        assert max(map(len, process.out.splitlines()), default=0) <= 80


# ---------------------------------------------------------------------------- --more


def test_more_also_measures_the_changed_suffix_and_the_hang_up_during_prefill_before_the_report(
    lab,
):
    lab.serve(prompt_ms=0.2, token_ms=3, silence=0.2)
    process = lab.run(RUN, "--more")
    assert process.returncode == 0, process.err
    assert set(lab.files()) == DELIVERED | {"cancel_prefill.json"}
    assert "changed_suffix" in lab.read("cache.json")
    headings = re.findall(r"\[(\d)/8\] (.*)", process.out)
    assert [number for number, _ in headings] == list("123456778")
    assert "cache, clock last" in process.out
    assert "next caller waits" in process.out.partition("[8/8]")[2]


def test_an_experiment_of_more_that_is_void_does_not_cost_the_report(lab):
    lab.serve(prompt_ms=0.01, token_ms=3)  # all of the prompt in 15 ms: nothing to hang up on
    process = lab.run(RUN, "--more")
    assert process.returncode == 1
    assert "void" in process.err
    assert "step 7 (hang-up during prefill) failed with exit status 1" in process.err
    assert lab.read("report.json")
    assert not (lab.out / "cancel_prefill.json").exists()


# ---------------------------------------------------------------------------- --fake, and signals


def processes():
    """Every process of the machine: {its id: its parent's id and its command}."""
    listed = subprocess.run(
        ["ps", "-Aww", "-o", "pid=", "-o", "ppid=", "-o", "args="],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return {
        int(pid): f"{ppid} {rest}"
        for pid, ppid, *rest in (line.split(None, 2) for line in listed.stdout.splitlines())
    }


def fakes_of(pid):
    """The ids of the fake servers that the run of run_all.sh with this id has started."""
    return {
        fake
        for fake, text in processes().items()
        if text.startswith(f"{pid} ") and "fake_server" in text
    }


def test_fake_does_all_steps_on_a_bare_machine_in_under_20_seconds(lab, bare):
    lab.env["VOICE_LLM_URL"] = "http://127.0.0.1:9"
    lab.env["VOICE_LLM_KB"] = "/nowhere"
    begin = time.time()
    process = lab.start(bare, RUN, "--fake")
    assert eventually(lambda: fakes_of(process.pid))
    servers = fakes_of(process.pid)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.strip().splitlines()
    assert "SIMULATED" in lines[0]
    assert "SIMULATED" in lines[-1]
    assert "Where the time goes: simulated" in out
    assert set(lab.files()) == DELIVERED
    assert (lab.out / "report.json").stat().st_mtime - begin < 20
    assert len(servers) == 1
    assert eventually(lambda: not servers & set(processes()))
    # A very busy machine may suspend a reader for 50 ms, and then that note is true.
    assert not re.search("^note: (?!.*suspended process)", err, re.MULTILINE)


def test_fake_goes_into_a_folder_of_its_own_where_none_is_set_or_it_is_blank(lab, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(TOP, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "fake-results"))
    for blank in None, " ":
        lab.env.pop("VOICE_LLM_OUT") if blank is None else lab.env.update(VOICE_LLM_OUT=blank)
        process = lab.start(str(copy / "run_all.sh"), "--fake")
        assert eventually(lambda: (copy / "fake-results" / "health.json").exists(), 20)
        process.terminate()
        process.communicate(timeout=20)
        shutil.rmtree(copy / "fake-results")
    assert "/fake-results/" in (TOP / ".gitignore").read_text().split()


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_fake_ends_its_server_however_the_run_ends(lab, signum, status):
    process = lab.start(RUN, "--fake")
    assert eventually(lambda: (lab.out / "health.json").exists(), 20)
    [pid] = fakes_of(process.pid)
    process.send_signal(signum)
    process.communicate(timeout=20)
    assert process.returncode == status
    assert eventually(lambda: pid not in processes())
    assert eventually(lambda: not [name for name in lab.files() if name.endswith(".tmp")])


@pytest.mark.parametrize("way", ["to the script alone", "to the group", "to both", "by timeout"])
@pytest.mark.parametrize("number", range(2))
def test_ctrl_c_at_a_random_moment_exits_with_130_without_a_traceback_and_leaves_nothing(
    lab, tmp_path, way, number
):
    moment = (
        random.uniform(0.02, 7) if number else random.uniform(0.02, 0.5)
    )  # the start is where imports are
    command = (
        ["timeout", "--preserve-status", "-s", "INT", f"{moment:.3f}"]
        if way == "by timeout"
        else []
    )
    process = lab.start(*command, RUN, "--fake", start_new_session=True)
    if way != "by timeout":
        time.sleep(moment)
        if way != "to the group":
            os.kill(process.pid, signal.SIGINT)
        if way != "to the script alone":
            os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, (moment, err)
    assert not [line for line in err.splitlines() if line.find("run_all.sh: ") > 0], (moment, err)
    assert "Traceback" not in out + err, (moment, err)
    assert "rror" not in err, (moment, err)
    left = subprocess.run(
        ["ps", "-o", "args=", "-s", str(process.pid)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert [line for line in left.stdout.splitlines() if "<defunct>" not in line] == [], (
        moment
    )  # ended, not yet reaped
    assert not [name for name in lab.files() if name.endswith(".tmp")], moment
    assert not list(tmp_path.glob("voice-llm.*")), moment


# ---------------------------------------------------------------------------- the README's commands


def test_the_readmes_three_commands_compare_two_prompts(lab, tmp_path):
    readme = (TOP / "README.md").read_text("utf-8")
    section = readme.partition("## You have a slow prompt")[2]
    commands = re.findall(r"^    (\S.*)$", section, re.MULTILINE)[:3]
    assert [command.split()[-2:] for command in commands[:2]] == [["./run_all.sh", "--more"]] * 2
    (tmp_path / "prompt.txt").write_text("You answer the phone of a clinic. " * 200)
    (tmp_path / "shorter.txt").write_text("You answer the phone of a clinic. " * 100)
    lab.serve(prompt_ms=0.08, token_ms=4, silence=0.1)
    for name in (
        "run_all.sh",
        "sse.py",
        "report.py",
        *(path.name for path in TOP.glob("measure_*.py")),
    ):
        (tmp_path / name).symlink_to(TOP / name)
    del lab.env["VOICE_LLM_OUT"]
    for command in commands:
        process = lab.run("bash", "-c", command, cwd=tmp_path)
        assert process.returncode == 0, process.err
    old, new = (
        json.loads((tmp_path / name / "report.json").read_text()) for name in ("before", "after")
    )
    assert old["prompt_n_12docs"] > new["prompt_n_12docs"] + 500
    assert re.search(
        rf"tokens, 12 docs +{old['prompt_n_12docs']} +{new['prompt_n_12docs']} +-", process.out
    )
