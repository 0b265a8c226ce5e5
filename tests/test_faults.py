"""Nothing false is ever written: what must fail fails and leaves everything as it was, and a note
says what else is in a figure. The faults of a server are the rows of faults.py."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import pytest
from conftest import STEPS, TESTS, TOP, eventually, reserved_port
from fake_server import ANSWERS, render, tokenize
from faults import ALL, CACHE, CANCEL, EARLY, FAULTS, LIMIT, PREFILL, SENTENCE, TTFT

import sse

COUNTING = "List the numbers from 1 to 300, separated by commas."
SERVE = {  # an answer, a prompt, that outlasts the hang-up, on a busy machine too
    CANCEL: {"token_ms": 20},
    EARLY: {"prompt_ms": 2, "batch": 64, "silence": 0.3},
}


def rows(outcome):
    return pytest.mark.parametrize(
        ("fault", "script", "expected"),
        [
            pytest.param(name, script, expected, id=f"{name}-{script}")
            for name, fault in FAULTS.items()
            for expected in fault.expected
            if expected.outcome == outcome
            for script in expected.scripts
        ],
    )


def serve(lab, fault, script, expected, **more):
    lab.cut = 1 if script == EARLY else expected.cut
    return lab.serve(fault=fault, **{**more, **SERVE.get(script, {})})


@rows("fails")
def test_it_fails_in_one_line_and_leaves_the_earlier_files(lab, fault, script, expected):
    serve(lab, fault, script, expected)
    if expected.limit:
        lab.env["VOICE_LLM_TIMEOUT"] = str(expected.limit)
    process = lab.run_fails(*script.split(), words=expected.words)
    assert process.seconds >= expected.limit
    # Who is told to allow more time has to be helped by it.
    assert "VOICE_LLM_TIMEOUT" not in process.line or "VOICE_LLM_TIMEOUT" in expected.words


@rows("noted")
def test_the_figure_is_written_and_a_note_says_what_is_in_it(lab, fault, script, expected):
    serve(lab, fault, script, expected, token_ms=20)
    if expected.limit:
        lab.env["VOICE_LLM_TIMEOUT"] = str(expected.limit)
    process = lab.run_ok(*script.split())
    lines = [line for line in process.err.splitlines() if line.startswith("note: ")]
    told = [line for line in lines if all(word in line for word in expected.words)]
    assert len(told) == 1, process.err
    assert process.notes in ([], told)
    name = "cancel_prefill.json" if script == EARLY else STEPS[script.split()[0]]
    assert (lab.out / name).exists()


@rows("harmless")
def test_it_is_read_right_and_nothing_is_noted(lab, fault, script, expected):
    serve(lab, fault, script, expected)
    assert lab.run_ok(script).notes == []
    result = lab.read("sentence.json")
    assert result["text"] == ANSWERS["How do I prepare for a fasting blood test?"]
    assert result["ttft_ms"] <= result["first_sentence_ms"] < result["total_ms"]


@rows("hung up")
def test_a_hang_up_in_mid_answer_is_seen_by_the_server(lab, fault, script, expected):
    fake = serve(lab, fault, script, expected)
    lab.run_ok(script)
    result = lab.read("cancel.json")
    assert (result["received_tokens"],) == expected.words
    assert result["closed_at_ms"] >= 1000 * lab.cut
    assert eventually(lambda: len(fake.closed_ms) == 1)
    assert [line for line in fake.log_lines if "cancel task" in line]


def test_a_fault_with_a_test_of_its_own_is_in_it():
    for name, fault in FAULTS.items():
        for expected in fault.expected:
            for file in expected.scripts if expected.outcome == "tested in" else ():
                assert f'"{name}"' in (TESTS / file).read_text("utf-8"), (name, file)


def test_the_fake_lists_its_faults_and_a_closed_pipe_is_no_traceback():
    command = [sys.executable, str(TESTS / "fake_server.py"), "--faults"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} == {*FAULTS}
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert process.stderr == b""


# ---------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("fault", ["cache_always", "cache_always_untold"])
@pytest.mark.parametrize("scripts", [("sse.py", TTFT), (SENTENCE, SENTENCE)])
def test_a_prompt_that_an_earlier_step_left_in_the_cache_is_found(lab, fault, scripts):
    lab.serve(fault=fault)
    lab.run_ok(scripts[0])
    lab.run_fails(scripts[1], words=("from a cache", "cache_prompt is false"))


@pytest.mark.parametrize("fault", [None, "cached_untold"])
@pytest.mark.parametrize(("number", "name"), [(1, "first"), (3, "changed_prefix")])
def test_a_prompt_that_should_be_cold_and_was_warm_is_found(lab, fault, number, name):
    lab.serve(fault=fault)
    lab.run_ok(CACHE)
    # As a second slot or cache does.
    lab.fake.slot.kept_prompt = tokenize(render(lab.fake.requests[number]["messages"]))
    lab.run_fails(CACHE, words=(f"{name} was answered from a cache", "--cache-ram 0", "-np 1"))


def test_what_a_chat_template_puts_in_front_of_every_prompt_is_no_cache(lab):
    """More than 40 tokens and less than a tenth; then fewer than 40, and more than a tenth."""
    lab.serve()
    lab.run_ok(CACHE)
    lab.fake.slot.kept_prompt = tokenize(render(lab.fake.requests[1]["messages"]))[:60]
    lab.run_ok(CACHE)
    assert lab.read("cache.json")["first"]["prompt_n"] < 1500
    lab.env["VOICE_LLM_KB"] = str(lab.out)
    (lab.out / "a.md").write_text("One short document.")
    lab.run_ok(CACHE)


# ---------------------------------------------------------------------------- can't be sent


@pytest.mark.parametrize("script", [TTFT, CANCEL])
def test_nothing_listens(lab, script):
    with reserved_port() as port:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
        words = ("no server answers at http://127.0.0.1:", "(Connection refused)", "voice-llm up")
        lab.run_fails(script, words=words)


def refuse_and_read_on(connection):
    connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    while connection.recv(2**20):
        pass


def read_nothing(connection):
    threading.Event().wait()  # for ever


def hang_up_at_once(connection):
    connection.close()


@pytest.mark.parametrize(
    ("behave", "word", "limit"),
    [
        (refuse_and_read_on, "answered 413", 60),
        (read_nothing, f"no answer after {LIMIT} s", LIMIT),
        (hang_up_at_once, "no answer before the connection ended (", 60),
    ],
)
def test_a_prompt_that_nobody_reads_to_its_end(lab, tmp_path, behave, word, limit):
    def answer(connection):
        with contextlib.suppress(OSError), connection:
            if connection.recv(100).startswith(b"GET"):
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                behave(connection)

    def accept(listener):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    (tmp_path / "prompt.txt").write_text("x" * 2**23)  # more than the buffers of a socket hold
    lab.env.update(VOICE_LLM_SYSTEM=str(tmp_path / "prompt.txt"), VOICE_LLM_TIMEOUT=str(limit))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        threading.Thread(target=accept, args=[listener], daemon=True).start()
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        lab.run_fails(TTFT, words=(word,))


def test_step_1_gives_up_on_a_server_that_never_gets_ready(lab):
    lab.serve(loading=3600)
    lab.env["VOICE_LLM_TIMEOUT"] = "4"
    lab.run_fails("sse.py", "--server", words=("still loading its model after 4 s",))


def test_a_host_name_that_dns_can_not_carry(lab):
    lab.env["VOICE_LLM_URL"] = f"http://{'a' * 64}.b"
    lab.run_fails(TTFT, words=("no server answers at http://aaa", "VOICE_LLM_URL"))


START, PARTS = "must start with http://, e.g. http://127", "must have a host, a port below 65536"
URLS = [(url, START) for url in "localhost localhost:8080 ftp://h https://127.0.0.1".split()]
URLS += [(url, PARTS) for url in "http:// http://h:port http://h:99999 http://[::1".split()]
URLS += [(url, PARTS) for url in "http://u:p@h http://h/?q http://h/#f http://hé".split()]


@pytest.mark.parametrize(("url", "words"), [*URLS, ("http://a b", PARTS), ("http://h\n", PARTS)])
def test_a_url_that_is_none(monkeypatch, url, words):
    monkeypatch.setenv("VOICE_LLM_URL", url)
    with pytest.raises(sse.Failure, match=f"VOICE_LLM_URL {words}") as failure:
        sse.get("/health")
    assert "u:p" not in str(failure.value)  # it may be a password


def test_a_url_that_is_none_ends_a_script_in_one_line(lab):
    lab.env["VOICE_LLM_URL"] = "https://127.0.0.1"
    for command in ["sse.py"], ["sse.py", "--server"], [TTFT], [PREFILL, "--check"]:
        process = lab.run_fails(*command, words=("VOICE_LLM_URL", "http://"))
        assert process.err.count("\n") == 1  # nobody waited for it to get better


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", "1e7"])
def test_a_timeout_that_is_no_number_of_seconds(monkeypatch, seconds):
    monkeypatch.setenv("VOICE_LLM_TIMEOUT", seconds)
    with pytest.raises(sse.Failure, match=r"VOICE_LLM_TIMEOUT is .*set it to seconds"):
        sse.timeout()


def test_check_finds_a_timeout_that_is_no_number_of_seconds(lab):
    lab.env["VOICE_LLM_TIMEOUT"] = "soon"
    lab.run_fails(PREFILL, "--check", words=("VOICE_LLM_TIMEOUT",))


def test_a_url_may_have_a_path_or_a_slash_at_its_end(lab):
    fake = lab.serve()
    lab.env["VOICE_LLM_URL"] = fake.url + "/"
    lab.run_ok("sse.py")
    lab.env["VOICE_LLM_URL"] = fake.url + "/proxied"
    lab.run_fails("sse.py", words=("404", "/proxied/v1/chat/completions", "File Not Found"))


# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize("script", ALL)
def test_a_folder_that_can_not_be_made_is_found_before_anything_is_asked(lab, script):
    fake = lab.serve()
    lab.out.write_text("a file")
    lab.env["VOICE_LLM_OUT"] = str(lab.out / "folder")
    lab.failed(lab.run(script), {}, ("VOICE_LLM_OUT", str(lab.out)))
    assert fake.requests == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that takes no file")
def test_a_folder_that_takes_no_file_is_found_before_anything_is_asked(lab):
    fake = lab.serve()
    lab.env["VOICE_LLM_OUT"] = "/proc"
    lab.failed(lab.run(TTFT), {}, ("can't write into /proc/ (", "VOICE_LLM_OUT"))
    assert fake.requests == []


LIMITED = """
import resource, runpy, sys
sys.dont_write_bytecode = True
room = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
del sys.argv[:2]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_with_room(lab, room, script):
    """Run a script that can write no file longer than `room` bytes: as on a disk that gets full."""
    process = lab.run(sys.executable, "-c", LIMITED, str(room), str(TOP / script))
    process.script = script
    return process


@pytest.mark.parametrize("script", ["sse.py", SENTENCE])
def test_a_disk_that_is_full_at_the_start_or_in_the_middle_of_a_write(lab, script):
    lab.serve()
    before = lab.write_earlier()
    for room in 0, 50:
        lab.failed(run_with_room(lab, room, script), before, ("can't write", str(lab.out)))


def test_no_file_of_a_step_is_replaced_before_all_are_written(lab):
    lab.serve(fault="recorded")
    before = lab.write_earlier()
    room = 2000  # enough for chunks.jsonl, and not for sse_raw.txt
    lab.failed(run_with_room(lab, room, "sse.py"), before, ("can't write",))
    (lab.out / "chunks.jsonl").unlink()
    (lab.out / "chunks.jsonl").mkdir()
    process = lab.run("sse.py")
    assert process.returncode == 1
    assert "chunks.jsonl (Is a directory): make room, or set VOICE_LLM_OUT" in process.err
    assert not list(lab.out.glob("*.tmp"))


def test_a_temporary_file_that_an_earlier_process_left_is_no_obstacle(tmp_path):
    path = tmp_path / "result.json"
    pathlib.Path(f"{path}.{os.getpid()}.tmp").write_text("left over")
    sse.save({str(path): {"a": 1}})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------- the hang-up


@pytest.mark.parametrize("script", [CANCEL, EARLY])
def test_a_close_that_came_late_is_void(lab, script):
    lab.serve(**SERVE[script])
    lab.late = -0.001  # so every close is too late, as that of a process that was suspended
    lab.run_fails(*script.split(), words=("the close came at ", "void", "suspended"))


@pytest.mark.parametrize("fault", ["slots_taken", "slots_without_id"])
def test_someone_elses_request_in_the_slot_is_not_waited_for(lab, fault):
    """slots_taken: it keeps the slot for ever; without an id_task the slot has to become idle."""
    lab.serve(fault=fault, **SERVE[CANCEL])
    lab.run_ok(CANCEL)


def test_the_slot_is_idle_when_slots_has_said_so_and_not_when_it_was_asked(lab):
    lab.serve(fault="slots_slow", **SERVE[CANCEL])
    lab.run_ok(CANCEL)
    assert lab.read("cancel.json")["slot_idle_after_ms"] >= 300


def test_a_hang_up_that_nobody_noticed_is_measured_to_the_end_of_the_answer(lab):
    fake = lab.serve(fault="deaf", token_ms=12)
    lab.run_ok(CANCEL)
    result = lab.read("cancel.json")
    assert result["slot_idle_after_ms"] >= fake.sent_ms[-1][-1] - result["closed_at_ms"] > 0


# ---------------------------------------------------------------------------- other people


@pytest.mark.parametrize("script", [SENTENCE, CANCEL])
def test_someone_elses_request_is_waited_for_and_not_counted(lab, script):
    """It holds the slot until the script has said that it waits, and hangs up then."""
    fake = lab.serve(token_ms=20)
    body = {"messages": sse.chat("", COUNTING), "max_tokens": 10**6, "stream": True}
    head = f"POST {sse.CHAT} HTTP/1.1\r\nContent-Length: {len(json.dumps(body))}\r\n\r\n"
    with socket.create_connection(fake.http.server_address) as other:
        other.sendall((head + json.dumps(body)).encode())
        assert eventually(lambda: fake.slot.processing)
        process = lab.start(script)
        assert process.stderr.readline().endswith("busy: waiting until it is idle\n")
        assert len(fake.requests) == 1
    assert lab.ended(process).returncode == 0, process.err
    assert len(fake.closed_ms) == (1 if script == SENTENCE else 2)


def test_who_waits_for_a_busy_slot_soon_asks_less_than_once_a_second(monkeypatch, capsys):
    """Asked more often, llama-server does not notice that a caller has hung up during prefill."""
    now, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(sse, "slots", lambda required: [{"is_processing": True}])
    monkeypatch.setattr(sse, "clock", lambda: now[0])
    monkeypatch.setattr(sse.time, "sleep", sleep)
    monkeypatch.setenv("VOICE_LLM_TIMEOUT", "4")
    with pytest.raises(sse.Failure, match="still busy after 4 s"):
        sse.wait_idle()
    soon = next(number for number, pause in enumerate(pauses) if pause > 1)
    assert sum(pauses[:soon]) < 0.6
    assert len(pauses[soon:]) <= 4
    assert capsys.readouterr().err.count("busy: waiting") == 1


# ---------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("fault", [None, "silence", "only_comments"])
def test_a_signal_ends_a_script_and_frees_the_server_at_once(lab, signum, status, fault):
    fake = lab.serve(token_ms=1000, fault=fault)
    before = lab.write_earlier()
    process = lab.start(TTFT)
    assert eventually(lambda: fake.requests and (fault or fake.sent_ms[0]))
    process.send_signal(signum)
    process.send_signal(signum)  # as from an impatient person
    assert lab.ended(process).returncode == status
    assert "Traceback" not in process.err
    assert eventually(lambda: len(fake.closed_ms) == 1)
    assert lab.files() == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_is_ending_changes_nothing(lab, signum):
    program = (
        "import atexit, sse, sys\n"
        "atexit.register(lambda: (print('ending', flush=True), sys.stdin.read()))\n"
        "sse.run(lambda: print('done'))"
    )
    process = lab.start(sys.executable, "-c", program, cwd=TOP, stdin=subprocess.PIPE)
    assert [process.stdout.readline() for _ in range(2)] == ["done\n", "ending\n"]
    process.send_signal(signum)
    lab.ended(process)
    assert (process.returncode, process.err) == (0, "")
