"""Nothing false is ever written: what must fail fails, and leaves everything as it was.

For every row: exit status 1, one line on stderr that says what happened and what to do, no
traceback, within the time that VOICE_LLM_TIMEOUT allows, every earlier result byte for byte as it
was, and no temporary file left.
"""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import TESTS, TOP, at_once, eventually
from fake_server import render, tokenize

LIMIT = 0.6  # seconds of VOICE_LLM_TIMEOUT for what only a timeout can end
EVERY = ("sse.py", "measure_ttft.py", "measure_prefill.py", "measure_cache.py", "measure_sentence.py")
TTFT, PREFILL, CACHE, CANCEL = "measure_ttft.py", "measure_prefill.py", "measure_cache.py", "measure_cancel.py"
ALL = (*EVERY, CANCEL)

# (scripts, fault of the server, words that the line must have)
ROWS = [
    # refusals
    (ALL, "loading", ("503", "Loading model", "wait until the model is loaded")),
    (ALL, "unauthorized", ("401", "Invalid API Key\\x1b[2J", "--api-key")),
    (ALL, "too_long", ("400", "request (6016 tokens) exceeds the available context size", "shorten the prompt")),
    ([TTFT], "proxy_page", ("502", "502 Bad Gateway")),
    (ALL, "login_page", ("text/html", "Sign in", "is this a llama-server?")),
    ([TTFT], "redirect", ("302",)),
    ([TTFT], "not_streaming", ("application/json", "not an event stream")),
    ([TTFT], "json_error_200", ("out of memory",)),
    ([TTFT], "not_http", ("no answer",)),
    ([TTFT], "hung_up", ("no answer", "without response")),
    ([TTFT], "error_body_silent", ("500",)),
    # cut off
    (ALL, "cut_between_chunks", ("no [DONE]",)),
    ([TTFT], "cut_inside_line", ("no [DONE]",)),
    ([TTFT], "cut_close", ("no [DONE]",)),
    ([TTFT], "cut_reset", ("no [DONE]", "reset")),
    (EVERY, "no_done", ("no [DONE]",)),
    ([TTFT], "empty_stream", ("no [DONE]",)),
    ([TTFT], "bad_chunk", ("no [DONE]",)),
    ([TTFT], "huge_chunk", ("no [DONE]",)),
    ([TTFT], "packed", ("gzip",)),
    # for ever
    ([TTFT], "finish_and_silence", ("no [DONE]", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "silence", ("no answer", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "silence_after_headers", ("0 fragments", "VOICE_LLM_TIMEOUT")),
    (EVERY, "only_comments", ("0 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "stall", ("4 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "dribble", ("4 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "dribble_headers", ("0 fragments", "VOICE_LLM_TIMEOUT")),
    # errors in the stream
    (EVERY, "error_event", ("the GPU fell off", "after 4 fragments")),
    ([TTFT], "error_event_first", ("the GPU fell off", "after 0 fragments")),
    ([TTFT], "error_event_and_done", ("the GPU fell off",)),
    ([TTFT], "error_text", ("the GPU fell off",)),
    ([TTFT], "error_object", ("the GPU fell off",)),
    ([TTFT], "error_field", ("the GPU fell off",)),
    ([TTFT], "error_field_first", ("the GPU fell off",)),
    ([TTFT], "error_json", ("the GPU fell off",)),
    ([TTFT], "error_named", ("the GPU fell off",)),
    ([TTFT], "error_finish", ("gave the answer up",)),
    ([CANCEL], "error_event", ("the GPU fell off",)),
    # no JSON, or not the API's
    (ALL, "not_json", ("not JSON", "{oops")),
    ([TTFT], "not_an_object", ("not of the API's shape",)),
    ([TTFT], "null_event", ("not of the API's shape",)),
    ([TTFT], "deep_json", ("not JSON",)),
    ([TTFT], "content_a_number", ("not of the API's shape",)),
    ([TTFT], "choices_a_text", ("not of the API's shape",)),
    ([TTFT], "joined_events", ("not JSON",)),
    # timings
    ([TTFT, PREFILL, CACHE], "no_timings", ("timings is missing",)),
    ([TTFT, PREFILL, CACHE], "timings_null", ("timings is missing",)),
    ([TTFT, PREFILL, CACHE], "timings_text", ("timings is missing",)),
    ([TTFT, PREFILL, CACHE], "timings_empty", ("timings is missing",)),
    ([TTFT, PREFILL, CACHE], "timings_nan", ("timings is nan", "not a number")),
    ([TTFT], "timings_true", ("timings is True", "not a number")),
    ([TTFT], "timings_words", ("timings is '12'", "not a number")),
    ([TTFT], "timings_negative", ("timings is -1", "not a number")),
    ([TTFT], "timings_huge", ("not a number",)),
    ([TTFT, PREFILL], "timings_fraction", ("12.5", "not a whole number")),
    ([CACHE], "all_cached", ("from a cache already", "--cache-ram 0")),
    # content
    (EVERY, "no_content", ("no content",)),
    (EVERY, "only_reasoning", ("only reasoning", "--reasoning-budget 0")),
    # the slot, and the cut
    ([CANCEL], "slots_off", ("/slots", "--no-slots")),
    ([CANCEL], "slots_missing", ("/slots", "--no-slots")),
    ([CANCEL], "slots_page", ("/slots", "--no-slots")),
    ([CANCEL], "slots_shape", ("/slots", "--no-slots")),
    ([CANCEL], "slots_texts", ("/slots", "--no-slots")),
    ([*EVERY, CANCEL], "slots_busy", ("still busy", "restart the server")),
    ([TTFT, CANCEL], "slots_silence", ("/slots: no answer", "VOICE_LLM_TIMEOUT")),
    ([CANCEL], "short", ("ended before the close", "void")),
    ([CANCEL], "short_finish_and_silence", ("ended before the close", "void")),
]


def failed(lab, process, before, *words):
    """The one line on stderr, after everything that must hold of a failed run."""
    assert process.returncode == 1, process.err
    assert "Traceback" not in process.err
    script = os.path.basename(process.args[1])
    lines = [line for line in process.err.splitlines() if line.startswith(script + ": ")]
    assert len(lines) == 1, process.err
    assert process.err.splitlines()[-1] == lines[0]
    assert all(c.isprintable() for c in lines[0])
    for word in words:
        assert word in lines[0]
    assert lab.files() == before
    return lines[0]


def fails(lab, command, *words):
    """Run a script over the files of an earlier run; it has to fail."""
    before = lab.files() or lab.earlier()
    failed(lab, lab.run(*command), before, *words)


PAIRS = [(fault, script, words) for scripts, fault, words in ROWS for script in scripts]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The run of every row: its lab, its process, and the files before it."""

    def run(lab, fault, script, words):
        lab.serve(fault=fault)
        before = lab.earlier()
        waits = fault in ("error_body_silent", "slots_busy") or "VOICE_LLM_TIMEOUT" in words
        lab.env["VOICE_LLM_TIMEOUT"] = str(LIMIT if waits else 10)
        return lab, lab.run(script), before

    return at_once(tmp_path_factory.mktemp("rows"), PAIRS, run)


@pytest.mark.parametrize(("fault", "script", "words"), PAIRS, ids=[f"{fault}-{script}" for fault, script, _ in PAIRS])
def test_it_fails_in_one_line_and_leaves_the_earlier_files(outcomes, fault, script, words):
    lab, process, before = outcomes[fault, script, words]
    failed(lab, process, before, *words)
    assert process.seconds < 5


def test_a_fault_that_only_the_timeout_ends_takes_as_long_as_the_timeout(lab):
    lab.serve(fault="only_comments")
    lab.earlier()
    lab.env["VOICE_LLM_TIMEOUT"] = "1"
    assert 1 <= lab.run(TTFT).seconds < 3


def test_a_line_without_an_end_is_given_up(lab):
    lab.serve(fault="runaway_line")
    before = lab.earlier()
    failed(lab, lab.run(TTFT), before, "a line of more than")


def test_a_first_request_out_of_a_cache_is_found_where_the_server_does_not_tell_what_it_reused(lab):
    """The prompt is in the slot already, and `hi` does not take it: as with a second slot."""
    fake = lab.serve(fault="cached_untold")
    lab.good(CACHE)
    fake.slot.keep = tokenize(render(fake.requests[1]["messages"]))
    fails(lab, [CACHE], "from a cache already", "--cache-ram 0")


def test_a_script_goes_on_where_the_server_does_not_tell_of_its_slots(lab):
    for fault in "slots_off", "slots_missing", "slots_page", "slots_shape":
        lab.serve(fault=fault)
        lab.good("measure_sentence.py")


@pytest.mark.parametrize("script", [*EVERY, CANCEL])
def test_nothing_listens(lab, script):
    with socket.create_server(("127.0.0.1", 0)) as free:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{free.getsockname()[1]}"
    fails(lab, [script], "no server answers at http://127.0.0.1:", "voice-llm up")


def test_step_1_gives_up_on_a_server_that_never_gets_ready(lab):
    lab.serve(loading=60)
    before = lab.earlier()
    lab.env["VOICE_LLM_TIMEOUT"] = "1"
    failed(lab, lab.run("sse.py", "--server"), before, "still loading after 1 s")


@pytest.mark.parametrize("answer", [b"<html><title>Router</title>", b"[]", b"{", b"\xff\xfe"])
def test_step_1_does_not_take_something_else_for_a_llama_server(lab, answer):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{server.server_address[1]}"
        fails(lab, ["sse.py", "--server"], "/health", "is this a llama-server?")
        server.shutdown()


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "localhost:8080",
        "ftp://h",
        "http://",
        "http://h:port",
        "http://h:99999",
        "http://[::1",
        "http://a b",
    ]
    + ["https://127.0.0.1", "http://u:p@h", "http://h/?q", "http://h/#f", "http://hé", "http://h\n", "http://.:80"],
)
def test_a_url_that_is_none(lab, url):
    lab.env["VOICE_LLM_URL"] = url
    fails(lab, ["sse.py"], "VOICE_LLM_URL")


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", "1e7"])
def test_a_timeout_that_is_no_number_of_seconds(lab, seconds):
    lab.serve()
    lab.env["VOICE_LLM_TIMEOUT"] = seconds
    fails(lab, ["sse.py"], "VOICE_LLM_TIMEOUT", "number of seconds")


def test_a_url_may_have_a_path_or_a_slash_at_its_end(lab):
    fake = lab.serve()
    lab.env["VOICE_LLM_URL"] = fake.url + "/"
    lab.good("sse.py")
    lab.env["VOICE_LLM_URL"] = fake.url + "/proxied"
    fails(lab, ["sse.py"], "404", "/proxied/v1/chat/completions", "File Not Found")


# ---------------------------------------------------------------------------- documents


@pytest.fixture
def documents(lab, tmp_path):
    folder = tmp_path / "kb"
    folder.mkdir()
    for n in range(12):
        (folder / f"{n:02}.md").write_text(f"Document {n}.\n")
    lab.env["VOICE_LLM_KB"] = str(folder)
    lab.serve()
    return folder


def test_fewer_than_12_documents_are_too_few_for_prefill(lab, documents):
    (documents / "11.md").unlink()
    fails(lab, [PREFILL], "11 documents", str(documents), "12")
    lab.good(CACHE)


@pytest.mark.parametrize("command", [[PREFILL], [CACHE], [CANCEL, "--during-prefill"]])
def test_no_documents_a_missing_folder_or_a_document_that_can_not_be_read(lab, documents, command):
    before = lab.earlier()
    (documents / "05.md").write_bytes("Größe".encode("latin-1"))
    failed(lab, lab.run(*command), before, str(documents / "05.md"), "not UTF-8")
    (documents / "05.md").unlink()
    (documents / "05.md").mkdir()
    failed(lab, lab.run(*command), before, str(documents / "05.md"), "not a file")
    lab.env["VOICE_LLM_KB"] = str(documents / "05.md")
    failed(lab, lab.run(*command), before, "no *.md", "VOICE_LLM_KB")
    lab.env["VOICE_LLM_KB"] = str(documents / "nowhere")
    failed(lab, lab.run(*command), before, str(documents / "nowhere"), "VOICE_LLM_KB")


def test_a_bom_crlf_an_empty_document_and_other_files_are_fine(lab, documents):
    (documents / "00.md").write_bytes(b"\xef\xbb\xbfOne\r\ntwo\r\n")
    (documents / "01.md").write_bytes(b"")
    (documents / "._02.md").write_bytes(b"\xff")
    (documents / "readme.txt").write_bytes(b"\xff")
    lab.good(PREFILL)
    prompt = lab.fake.requests[2]["messages"][0]["content"]
    assert "\n\nOne\ntwo\n\n\n\nDocument 2.\n\n" in prompt
    assert lab.read("prefill.json")[2]["docs"] == 12


def test_documents_are_in_the_order_of_their_names_as_bytes(lab, documents):
    (documents / "00.md").rename(documents / "b.md")
    (documents / "10.md").rename(documents / "C.md")
    lab.good(PREFILL)
    assert lab.fake.requests[2]["messages"][0]["content"].endswith("Document 11.\n\nDocument 10.\n\nDocument 0.")


# ---------------------------------------------------------------------------- files


def test_an_output_folder_is_made_with_its_parents(lab):
    lab.serve()
    lab.out = lab.out / "a" / "b"
    lab.env["VOICE_LLM_OUT"] = str(lab.out)
    lab.good("sse.py")
    assert set(lab.files()) == {"sse_raw.txt", "chunks.jsonl"}


@pytest.mark.parametrize("script", [*EVERY, CANCEL])
def test_an_output_folder_that_can_not_be_made_is_found_before_anything_is_measured(lab, tmp_path, script):
    fake = lab.serve()
    (tmp_path / "file").write_text("a file")
    lab.env["VOICE_LLM_OUT"] = str(tmp_path / "file" / "folder")
    failed(lab, lab.run(script), {}, "VOICE_LLM_OUT", str(tmp_path / "file"))
    assert fake.requests == []


LIMITED = """
import resource, runpy, sys
room = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
del sys.argv[:2]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def with_room(lab, room, script):
    """Run a script that can write no file longer than `room` bytes."""
    process = lab.run(sys.executable, "-c", LIMITED, str(room), str(TOP / script))
    process.args = [sys.executable, script]
    return process


@pytest.mark.parametrize("room", [0, 10, 100])
def test_a_disk_that_is_full_at_any_point_of_a_write(tmp_path, room):
    """A limit on the size of a file fails a write just where a full disk would."""

    def fail(lab, script):
        lab.serve(token_ms=4)
        before = lab.earlier()
        process = with_room(lab, room, script)
        failed(lab, process, before, "can't write", str(lab.out))

    at_once(tmp_path, [(script,) for script in (*EVERY, CANCEL)], fail)


def test_two_files_of_one_step_are_written_both_or_none(lab):
    lab.serve(fault="recorded")
    before = lab.earlier()
    room = 2000  # enough for chunks.jsonl, and not for sse_raw.txt
    process = with_room(lab, room, "sse.py")
    failed(lab, process, before, "can't write")
    (lab.out / "chunks.jsonl").unlink()
    (lab.out / "chunks.jsonl").mkdir()
    process = lab.run("sse.py")
    assert process.returncode == 1
    assert "is a directory" in process.err
    assert (lab.out / "sse_raw.txt").read_bytes() == before["sse_raw.txt"]
    assert sorted(path.name for path in lab.out.iterdir()) == sorted(before)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_result_that_can_not_be_printed_is_a_failure_in_one_line(lab):
    lab.serve()
    with open("/dev/full", "w") as full:
        process = lab.run("measure_sentence.py", stdout=full)
    assert process.returncode == 1
    assert "Traceback" not in process.err
    assert process.err.splitlines()[-1].startswith("measure_sentence.py: can't print the result (")


def test_a_pipe_that_closes_early_is_no_traceback(lab):
    lab.serve()
    read, write = os.pipe()
    os.close(read)
    process = lab.run("sse.py", stdout=write)
    os.close(write)
    assert process.returncode == 1
    assert process.err.splitlines() == ["asking: What should a new patient bring?"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_progress_that_can_not_be_printed_stops_no_measurement(lab):
    lab.serve()
    with open("/dev/full", "w") as full:
        process = lab.run("measure_sentence.py", stderr=full)
    assert process.returncode == 0
    assert lab.read("sentence.json")


def test_a_terminal_that_stalls_does_not_stop_the_clock(lab):
    """The pipe to the terminal holds 64 kB, the answer is longer, and nobody reads for a while."""
    lab.serve(fault="long_answer")
    process = lab.start("sse.py")
    time.sleep(1.5)
    process.communicate(timeout=20)
    assert process.returncode == 0
    chunks = [json.loads(line) for line in (lab.out / "chunks.jsonl").read_text("utf-8").splitlines()]
    assert len(chunks) == 30
    assert chunks[-1]["t_ms"] < 1000


# ---------------------------------------------------------------------------- the cut

CUTS = {
    "while fragments flow": {"token_ms": 8},
    "in a stall after five events": {"fault": "stall"},
    "in a stall with Connection: close": {"fault": "stall_close"},
    "among dribbled bytes": {"fault": "dribble"},
    "among dribbled bytes of the headers": {"fault": "dribble_headers"},
    "while the prompt is computed": {"prompt_ms": 20.0},
    "before any headers": {"fault": "silence"},
    "after the headers": {"fault": "silence_after_headers"},
    "among comments": {"fault": "only_comments"},
}


def test_the_cut_comes_at_500_ms_and_the_server_sees_it(tmp_path):
    def cut(lab, when):
        fake = lab.serve(**CUTS[when])
        lab.good(CANCEL)
        result = lab.read("cancel.json")
        assert 500 <= result["closed_at_ms"] < 600, when
        [closed_ms] = fake.closed_ms
        assert abs(closed_ms - result["closed_at_ms"]) < 60, when
        sent = len([ms for ms in fake.sent_ms[0] if ms < result["closed_at_ms"]])
        assert sent - 2 <= result["received_tokens"] <= sent, when  # one or two may have been on their way
        assert [line for line in fake.log_lines if "cancel task" in line], when

    at_once(tmp_path, [(when,) for when in CUTS], cut)


# ---------------------------------------------------------------------------- other people, other keys


def occupy(fake, max_tokens):
    """Someone else's request, which holds the slot → its connection."""
    messages = [{"role": "user", "content": "List the numbers from 1 to 300, separated by commas."}]
    body = json.dumps({"messages": messages, "max_tokens": max_tokens, "stream": True}).encode()
    connection = socket.create_connection(fake.http.server_address)
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    while not fake.slot.processing:
        time.sleep(0.005)
    return connection


def test_someone_elses_request_is_waited_for_and_not_counted(tmp_path):
    def wait(lab, script):
        fake = lab.serve(token_ms=10)
        with occupy(fake, 150):
            process = lab.good(script)
        assert "busy: waiting" in process.err
        assert process.seconds > 1
        other, ours = fake.sent_ms[0], fake.sent_ms[1]
        assert len(other) == 150
        assert ours[0] < 500  # it did not queue behind the other one

    at_once(tmp_path, [(script,) for script in (*EVERY, CANCEL)], wait)


def test_every_request_is_sent_to_an_idle_server(tmp_path):
    def ask(lab, script):
        fake = lab.serve(token_ms=4)
        lab.good(script)
        sent = [n for n, path in enumerate(fake.paths) if path == "/v1/chat/completions"]
        assert all(n and fake.paths[n - 1] == "/slots" for n in sent), script

    at_once(tmp_path, [(script,) for script in ALL], ask)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("fault", [None, "silence", "only_comments"])
def test_a_signal_ends_a_script_and_frees_the_server_at_once(lab, signum, status, fault):
    fake = lab.serve(token_ms=100, fault=fault)
    before = lab.earlier()
    process = lab.start(TTFT)
    while not fake.requests or (fault is None and not fake.sent_ms[0]):
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(signum)
    process.send_signal(signum)  # as from an impatient person
    _, err = process.communicate(timeout=10)
    assert process.returncode == status
    assert "Traceback" not in err
    assert eventually(lambda: len(fake.closed_ms) == 1)
    assert lab.files() == before


def test_the_fake_lists_its_faults_by_name(lab):
    listed = subprocess.run(
        [sys.executable, str(TESTS / "fake_server.py"), "--faults"], capture_output=True, encoding="utf-8", check=True
    ).stdout
    for _, fault, _ in ROWS:
        assert f"\n{fault} " in "\n" + listed
