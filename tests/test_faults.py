"""Nothing false is ever written: what must fail fails and leaves everything as it was, and a note says what else is
in a figure.

A row of ROWS: exit status 1, one line on stderr that says what happened and what to do, no traceback, within the
time that VOICE_LLM_TIMEOUT allows, every earlier result byte for byte as it was, and no temporary file left.
"""

import contextlib
import http.server
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import faults
import pytest
from conftest import STEPS, TESTS, TOP, eventually, reserved_port
from fake_server import render, tokenize

import sse

LIMIT = 0.6  # seconds of VOICE_LLM_TIMEOUT for what only a timeout can end
TTFT, PREFILL, CACHE, CANCEL = (
    "measure_ttft.py",
    "measure_prefill.py",
    "measure_cache.py",
    "measure_cancel.py",
)
SENTENCE, EARLY = "measure_sentence.py", "measure_cancel.py --during-prefill"
ALL = (*STEPS,)

# (scripts, fault of the server, words that the line must have)
ROWS = [
    # refusals, and advice that fits them
    (
        ALL,
        "too_long",
        (
            "400",
            "request (6016 tokens) exceeds the available context size",
            "shorten the prompt",
            "-np 1",
        ),
    ),
    ([TTFT], "context_exceeded", ("500", "Context size", "shorten the prompt")),
    (
        [TTFT],
        "embeddings",
        ("501", "Start it without `--embeddings`", "restart llama-server as its message says"),
    ),
    ([TTFT], "router", ("400", "model name is missing", "router", "(-m)")),
    ([TTFT], "bad_request", ("400", "must contain content", "look at the server's log")),
    ([TTFT], "loading", ("503", "Loading model", "wait until the model is loaded")),
    ([TTFT], "proxy_503", ("503", "Service Unavailable", "proxy can't reach llama-server")),
    ([TTFT], "unauthorized", ("401", "Invalid API Key\\x1b[2J", "--api-key")),
    ([TTFT], "login_401", ("401", "Please log in", "VOICE_LLM_URL")),
    ([TTFT], "too_large", ("413", "Too Large", "size")),
    ([TTFT], "rate_limited", ("429", "Too Many", "limits the number of requests")),
    ([TTFT], "redirect", ("301", "redirect", "VOICE_LLM_URL")),
    ([TTFT], "proxy_page", ("502", "502 Bad Gateway", "proxy can't reach llama-server")),
    ([TTFT], "login_page", ("text/html", "Sign in", "is this a llama-server")),
    ([TTFT], "text_plain", ("text/plain", "not an event stream", "is this a llama-server")),
    ([TTFT], "not_streaming", ("application/json", "not an event stream")),
    ([TTFT], "json_error_200", ("out of memory",)),
    ([TTFT], "not_http", ("no answer",)),
    ([TTFT], "hung_up", ("no answer", "(Remote end closed connection without response)")),
    ([TTFT], "error_body_silent", ("500",)),
    ([TTFT], "compressed", ("gzip", "remove the proxy")),
    # cut off
    (
        [TTFT, CANCEL],
        "cut_between_chunks",
        ("the connection ended after 4 fragments, before [DONE]",),
    ),
    ([TTFT], "cut_inside_line", ("before [DONE]",)),
    ([TTFT], "cut_close", ("before [DONE]",)),
    ([TTFT], "cut_reset", ("before [DONE] (Connection reset by peer)",)),
    ([TTFT], "no_done", ("before [DONE]",)),
    ([TTFT], "empty_stream", ("after 0 fragments, before [DONE]",)),
    ([TTFT], "bad_chunk", ("before [DONE]",)),
    ([TTFT], "huge_chunk", ("before [DONE]",)),
    ([TTFT], "runaway_line", ("a line of more than",)),
    # cut short, with a [DONE] all the same
    ([TTFT, CANCEL], "polite_cut", ("cut short", "[DONE] after 4 fragments", "no finish_reason")),
    ([TTFT], "polite_cut_timings", ("cut short", "[DONE] after 4 fragments", "no finish_reason")),
    ([TTFT], "finish_filter", ("cut short", "finish_reason 'content_filter'")),
    # for ever
    ([TTFT], "finish_and_silence", ("no [DONE]", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "silence", ("no answer", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "silence_after_headers", ("0 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "only_comments", ("0 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "stall", ("4 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "stall_close", ("4 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "dribble", ("4 fragments", "VOICE_LLM_TIMEOUT")),
    ([TTFT], "dribble_headers", ("0 fragments", "VOICE_LLM_TIMEOUT")),
    # errors in the stream
    ([TTFT, CANCEL], "error_event", ("the GPU fell off", "after 4 fragments")),
    ([TTFT], "error_event_first", ("the GPU fell off", "after 0 fragments")),
    ([TTFT], "error_event_and_done", ("the GPU fell off",)),
    ([TTFT], "error_text", ("the GPU fell off",)),
    ([TTFT], "error_beside_choices", ("the GPU fell off", "reported an error")),
    ([TTFT], "error_object", ("the GPU fell off",)),
    ([TTFT], "error_field", ("the GPU fell off",)),
    ([TTFT], "error_field_first", ("the GPU fell off",)),
    ([TTFT], "error_json", ("the GPU fell off",)),
    ([TTFT], "error_named", ("the GPU fell off",)),
    ([TTFT], "error_code", ("the GPU fell off", "reported an error")),
    ([TTFT], "error_detail", ("the GPU fell off", "reported an error")),
    ([TTFT], "error_context", ("Context size", "shorten the prompt")),
    ([TTFT], "error_finish", ("cut short", "finish_reason 'error'")),
    # no JSON, or not the API's
    ([TTFT], "not_json", ("not JSON", "{oops")),
    ([TTFT], "not_an_object", ("not of the API's shape",)),
    ([TTFT], "null_event", ("not of the API's shape",)),
    ([TTFT], "deep_json", ("not JSON",)),
    ([TTFT], "content_a_number", ("not of the API's shape",)),
    ([TTFT], "choices_a_text", ("not of the API's shape",)),
    ([TTFT], "joined_events", ("not JSON",)),
    # timings
    ([TTFT, PREFILL, CACHE], "no_timings", ("the server's timings lack p",)),
    ([TTFT], "timings_null", ("the server's timings lack predicted_n: is http://",)),
    ([TTFT], "timings_text", ("timings lack predicted_n",)),
    ([TTFT, PREFILL], "timings_empty", ("timings lack p",)),
    ([TTFT], "timings_nan", ("nan", "predicted_n", "not a whole number")),
    ([TTFT], "timings_true", ("True", "not a whole number")),
    ([TTFT], "timings_words", ("'12'", "not a whole number")),
    ([TTFT], "timings_negative", ("-1", "not a whole number")),
    ([TTFT], "timings_huge", ("not a whole number",)),
    ([TTFT, PREFILL], "timings_fraction", ("12.5", "not a whole number")),
    # the cache was not off, or not cold
    ([TTFT, PREFILL], "cache_always", ("from a cache", "cache_prompt is false")),
    (
        [TTFT],
        "cache_always_untold",
        ("1 token computed of a prompt of 17 words", "came from a cache", "cache_prompt is false"),
    ),
    ([TTFT], "cache_partly_untold", ("59, 39, 39, 39, 39 tokens", "the KV cache was on")),
    (
        [CACHE],
        "all_cached",
        ("first was answered from a cache already", "tokens reused", "--cache-ram 0"),
    ),
    # content
    ([TTFT], "no_content", ("no content", "is it a chat model?")),
    ([TTFT], "only_reasoning", ("only reasoning", "--reasoning-budget 0")),
    # the slot
    ([CANCEL], "slots_off", ("/slots", "501", "--no-slots")),
    ([CANCEL], "slots_missing", ("/slots", "404", "is this a llama-server")),
    ([CANCEL], "slots_401", ("/slots", "401", "--api-key")),
    ([CANCEL], "slots_502", ("/slots", "502", "proxy")),
    ([CANCEL], "slots_loading", ("/slots", "503", "wait until the model is loaded")),
    ([CANCEL], "slots_router", ("/slots", "400", "router")),
    ([CANCEL], "slots_page", ("/slots", "is this a llama-server")),
    ([CANCEL], "slots_deep", ("/slots", "is this a llama-server")),
    ([CANCEL], "slots_shape", ("/slots", "is this a llama-server")),
    ([CANCEL], "slots_texts", ("/slots", "is this a llama-server")),
    ([TTFT, CANCEL], "slots_busy", ("still busy", "restart the server")),
    ([TTFT, CANCEL], "slots_silence", ("/slots: no answer", "VOICE_LLM_TIMEOUT")),
    # the cut
    ([CANCEL], "short", ("ended before the close at 500 ms", "void")),
    ([CANCEL], "short_finish_and_silence", ("ended before the close", "void")),
    ([CANCEL], "late_content", ("prefill", "void", "KV cache")),
    ([CANCEL], "long_reasoning", ("only reasoning", "void", "--reasoning-budget 0")),
    ([CANCEL], "late_headers", ("had not answered", "void", "too far away", "refuse")),
    ([CANCEL], "late_refusal", ("had not answered", "void", "too far away", "refuse")),
    ([CANCEL], "slots_cached", ("/slots showed no slot at work", "void", "caches")),
    ([CANCEL], "slots_taken_without_id", ("still busy", "after the close")),
    ([CANCEL], "slots_two_at_work", ("2 requests were at work", "void", "-np 1")),
    (
        [CANCEL],
        "slots_slow_at_work",
        ("/slots did not answer between the first token and the close", "void"),
    ),
    ([EARLY], "long_reasoning", ("the first token came before the close at 100 ms", "void")),
    ([EARLY], "late_headers", ("had not accepted", "void", "too far away", "refuse")),
    ([EARLY], "late_refusal", ("had not accepted", "void", "too far away", "refuse")),
    ([EARLY], "no_content", ("no content",)),
]
PAIRS = [(fault, script, words) for scripts, fault, words in ROWS for script in scripts]
WAITS = {"slots_busy", "slots_silence", "slots_taken_without_id", "short_finish_and_silence"}


@pytest.mark.parametrize(
    ("fault", "script", "words"), PAIRS, ids=[f"{fault}-{script}" for fault, script, _ in PAIRS]
)
def test_it_fails_in_one_line_and_leaves_the_earlier_files(lab, fault, script, words):
    prompt_ms = 0.5 if script == EARLY else 0.02
    lab.serve(fault=fault, prompt_ms=prompt_ms, token_ms=4 if script == CANCEL else 1)
    if fault in WAITS or "VOICE_LLM_TIMEOUT" in words:
        lab.env["VOICE_LLM_TIMEOUT"] = str(LIMIT)
    assert lab.run_fails(*script.split(), words=words).seconds < 6


# (scripts, fault, words of the note)
NOTES = [
    (
        [TTFT],
        "queued",
        ("a first token took ", " by the server's clock", "queue", "network", "suspended"),
    ),
    ([SENTENCE], "early_role", ("a first token took ", " by the server's clock")),
    ([TTFT], "timings_early", ("a first token took ", "90000 by the server's clock")),
    ([TTFT], "buffered", ("an answer came in ", " by the server's clock", "buffers", "suspended")),
    ([SENTENCE], "slow_line", ("an answer came in ", " by the server's clock")),
    ([PREFILL], "cached_untold", ("nobody knows whether the cache was off",)),
    (["sse.py"], "no_timings", ("nobody knows whether the cache was off",)),
    ([SENTENCE], "buffered_untold", ("fragments came within 1 ms", "buffers")),
    ([SENTENCE], "reasoning_first", ("reasoning came first: ", "ms of the first token's time")),
    ([TTFT], "slots_second_busy", ("another slot was busy", "shared the machine")),
    (["sse.py", SENTENCE], "slots_off", ("nobody knows whether the server was idle", "--no-slots")),
    ([SENTENCE], "slots_missing", ("nobody knows whether the server was idle", "404")),
    ([SENTENCE], "long_answer", ("no sentence ended",)),
    (
        [CACHE],
        "recomputes",
        ("second reused nothing", "sliding window", "--no-cache-prompt", "another request"),
    ),
    ([CANCEL], "slots_slow", ("/slots took 3", "ms to answer", "network")),
    ([f"{CACHE} --changed-suffix"], "recomputes", ("second and changed_suffix reused nothing",)),
]
NOTED = [(fault, script, words) for scripts, fault, words in NOTES for script in scripts]


@pytest.mark.parametrize(
    ("fault", "script", "words"), NOTED, ids=[f"{fault}-{script}" for fault, script, _ in NOTED]
)
def test_the_figure_is_written_and_one_line_says_what_else_is_in_it(lab, fault, script, words):
    lab.serve(fault=fault, token_ms=5)
    for _ in range(
        5 if fault == "buffered_untold" else 1
    ):  # a busy machine may stop the reader within its 1 ms
        process = lab.run_ok(*script.split())
        notes = [line for line in process.err.splitlines() if line.startswith("note: ")]
        if all(word in " ".join(notes) for word in words):
            break
    else:
        pytest.fail(process.err)
    # What is held back also comes late; without timings nobody knows about the cache; nine fragments are no sentence.
    kinds = {"buffered": 2, "buffered_untold": 3}.get(fault, 1)
    assert len(notes) <= kinds, process.err
    assert (lab.out / STEPS[script.split()[0]]).exists()


@pytest.mark.parametrize("script", [*STEPS, f"{CACHE} --changed-suffix", EARLY])
def test_nothing_is_said_of_a_healthy_server(lab, script):
    lab.serve(prompt_ms=0.3, token_ms=4, silence=0.3)
    for _ in range(
        3
    ):  # a very busy machine may suspend the reader for 50 ms, and then a note is true
        process = lab.run_ok(*script.split())
        if "note:" not in process.err:
            return
    pytest.fail(process.err)


def test_a_slot_that_is_still_winding_up_is_not_another_request(lab):
    lab.serve(fault="slots_second_ends")
    assert "note:" not in lab.run_ok(SENTENCE).err


def test_every_fault_has_a_test():
    tests = "".join(path.read_text("utf-8") for path in TESTS.glob("test_*.py"))
    assert [
        name
        for name in {*faults.CHAT, *faults.SLOTS} - {*faults.HARMLESS}
        if f'"{name}"' not in tests
    ] == []


def test_a_fault_that_only_the_timeout_ends_takes_as_long_as_the_timeout(lab):
    lab.serve(fault="only_comments")
    lab.env["VOICE_LLM_TIMEOUT"] = "1"
    assert 1 <= lab.run_fails(TTFT).seconds < 5


# ---------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("fault", ["cache_always", "cache_always_untold"])
@pytest.mark.parametrize("scripts", [("sse.py", TTFT), (SENTENCE, SENTENCE)])
def test_a_prompt_that_an_earlier_step_left_in_the_cache_is_found(lab, fault, scripts):
    lab.serve(fault=fault)
    lab.run_ok(scripts[0])
    lab.run_fails(scripts[1], words=("from a cache", "cache_prompt is false"))


def kept_prompt(lab, number):
    """Run step 5, and keep the prompt of its request `number` for ever, as a second slot or cache does."""
    lab.run_ok(CACHE)
    lab.fake.slot.kept_prompt = tokenize(render(lab.fake.requests[number]["messages"]))


@pytest.mark.parametrize("fault", [None, "cached_untold"])
@pytest.mark.parametrize(("number", "name"), [(1, "first"), (3, "changed_prefix")])
def test_a_prompt_that_should_be_cold_and_was_warm_is_found(lab, fault, number, name):
    lab.serve(fault=fault)
    kept_prompt(lab, number)
    lab.run_fails(
        CACHE, words=(f"{name} was answered from a cache already", "--cache-ram 0", "-np 1")
    )


def test_two_warm_prompts_are_found_where_the_server_does_not_tell(lab):
    lab.serve(fault="everything_kept_untold")
    lab.run_fails(CACHE, words=("first was answered from a cache already",))


def test_what_a_chat_template_puts_in_front_of_every_prompt_is_no_cache(lab):
    """Tokens that all prompts share: more than 40, and less than a tenth; and fewer than 40, and more than a tenth."""
    lab.serve()
    lab.run_ok(CACHE)
    lab.fake.slot.kept_prompt = tokenize(render(lab.fake.requests[1]["messages"]))[:60]
    lab.run_ok(CACHE)
    assert lab.read("cache.json")["first"]["prompt_n"] < 1500
    lab.env["VOICE_LLM_KB"] = str(lab.out)
    (lab.out / "a.md").write_text("One short document.")
    lab.run_ok(CACHE)


# ---------------------------------------------------------------------------- requests that can't be sent


@pytest.mark.parametrize("script", [TTFT, CANCEL])
def test_nothing_listens(lab, script):
    with reserved_port() as port:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
        lab.run_fails(
            script,
            words=(
                "no server answers at http://127.0.0.1:",
                "(Connection refused)",
                "voice-llm up",
            ),
        )


def refuse_and_read_on(connection):
    connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    while connection.recv(2**20):
        pass


def read_nothing(connection):
    time.sleep(30)


def hang_up_at_once(connection):
    connection.close()


@pytest.mark.parametrize(
    ("behave", "word"),
    [
        (refuse_and_read_on, "answered 413"),
        (read_nothing, "no answer after 1 s"),
        (hang_up_at_once, "no answer ("),
    ],
)
def test_a_long_prompt_that_is_refused_not_read_or_hung_up_on_while_it_is_sent(
    lab, tmp_path, behave, word
):
    (tmp_path / "prompt.txt").write_text("word " * 8_000_000)
    lab.env.update(VOICE_LLM_SYSTEM=str(tmp_path / "prompt.txt"), VOICE_LLM_TIMEOUT="1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer(connection):
            with contextlib.suppress(OSError), connection:
                if connection.recv(100).startswith(b"GET"):
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                else:
                    behave(connection)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        assert lab.run_fails(TTFT, words=(word,)).seconds < 10


def test_step_1_gives_up_on_a_server_that_never_gets_ready(lab):
    lab.serve(loading=60)
    lab.env["VOICE_LLM_TIMEOUT"] = "1"
    lab.run_fails("sse.py", "--server", words=("still loading its model after 1 s",))


ANYTHING = [
    (200, b"<html><title>Router</title>", "is this a llama-server"),
    (200, b"[]", "is this a llama-server"),
    (200, b"{", "is this a llama-server"),
    (200, b"[" * 100_000, "is this a llama-server"),
    (200, b"\xff\xfe", "is this a llama-server"),
    (200, b'{"error": "no such path"}', "no such path"),
    (503, b"<html><title>503 Service Unavailable</title>", "a proxy can't reach llama-server"),
]


@pytest.mark.parametrize(("status", "body", "advice"), ANYTHING)
def test_step_1_does_not_take_something_else_for_a_llama_server(lab, status, body, advice):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{server.server_address[1]}"
        process = lab.run_fails("sse.py", "--server", words=("/health", str(status), advice))
        server.shutdown()
    assert process.seconds < 5


def test_a_server_that_is_silent_on_health_is_left_after_5_s_and_no_setting_that_can_not_help_is_named(
    lab,
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        lab.env["VOICE_LLM_TIMEOUT"] = "600"
        process = lab.run_fails(
            "sse.py", "--server", words=("/health: no answer after 5 s", "restart")
        )
    assert "VOICE_LLM_TIMEOUT" not in process.line


def test_a_host_name_that_dns_can_not_carry(lab):
    lab.env["VOICE_LLM_URL"] = f"http://{'a' * 64}.b"
    lab.run_fails(TTFT, words=("no server answers at http://aaa", "VOICE_LLM_URL"))


URLS = [
    "localhost",
    "localhost:8080",
    "ftp://h",
    "http://",
    "http://h:port",
    "http://h:99999",
    "http://[::1",
]
URLS += [
    "http://a b",
    "https://127.0.0.1",
    "http://u:p@h",
    "http://h/?q",
    "http://h/#f",
    "http://hé",
    "http://h\n",
]


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_is_none(monkeypatch, url):
    monkeypatch.setenv("VOICE_LLM_URL", url)
    with pytest.raises(sse.Failure, match=r"VOICE_LLM_URL is .*only http:// can be measured"):
        sse.get("/health")


def test_a_url_that_is_none_ends_a_script_in_one_line(lab):
    lab.env["VOICE_LLM_URL"] = "https://127.0.0.1"
    for command in ["sse.py"], ["sse.py", "--server"], [TTFT], [PREFILL, "--check"]:
        process = lab.run_fails(*command, words=("VOICE_LLM_URL", "only http://"))
        assert process.err.count("\n") == 1  # nobody waited for it to get better


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", "1e7"])
def test_a_timeout_that_is_no_number_of_seconds(monkeypatch, seconds):
    monkeypatch.setenv("VOICE_LLM_TIMEOUT", seconds)
    with pytest.raises(sse.Failure, match=r"VOICE_LLM_TIMEOUT is .*number of seconds"):
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


# ---------------------------------------------------------------------------- documents and prompts


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
    lab.run_fails(PREFILL, words=("11 documents", str(documents), "12"))
    lab.run_fails(PREFILL, "--check", words=("11 documents",))
    lab.run_ok(CACHE)
    assert lab.fake.requests


@pytest.mark.parametrize("command", [PREFILL, CACHE, EARLY])
def test_no_documents_a_missing_folder_or_a_document_that_can_not_be_read(lab, documents, command):
    def fails(*words):
        lab.run_fails(*command.split(), words=words)

    (documents / "05.md").write_bytes("Größe".encode("latin-1"))
    fails(str(documents / "05.md"), "not UTF-8", "convert it to UTF-8")
    (documents / "05.md").unlink()
    (documents / "05.md").mkdir()
    fails(str(documents / "05.md"), "not a file")
    lab.env["VOICE_LLM_KB"] = str(documents / "05.md")
    fails("no *.md", "VOICE_LLM_KB")
    lab.env["VOICE_LLM_KB"] = str(documents / "nowhere")
    fails(str(documents / "nowhere"), "No such file", "VOICE_LLM_KB")
    assert lab.fake.requests == []


def test_a_bom_crlf_and_other_files_are_fine_and_empty_documents_are_named(lab, documents):
    (documents / "00.md").write_bytes(b"\xef\xbb\xbfOne\r\ntwo\r\n")
    (documents / "01.md").write_bytes(b"")
    (documents / "._02.md").write_bytes(b"\xff")
    (documents / "readme.txt").write_bytes(b"\xff")
    process = lab.run_ok(PREFILL)
    prompt = lab.fake.requests[2]["messages"][0]["content"]
    assert "\n\nOne\ntwo\n\n\n\nDocument 2.\n\n" in prompt
    assert lab.read("prefill.json")[2]["docs"] == 12
    assert "note: empty" in process.err
    assert process.err.rstrip().endswith(": 01.md")
    assert "01.md" in lab.run_ok(CACHE).err


def test_step_4_reads_and_names_only_the_documents_that_it_sends(lab, documents):
    (documents / "12.md").write_bytes(b"")
    (documents / "13.md").write_bytes(b"\xff")
    assert "note:" not in lab.run_ok(PREFILL).err
    lab.run_fails(PREFILL, "--check", words=("13.md", "not UTF-8"))  # step 5 sends all


def test_documents_are_in_the_order_of_their_names_as_bytes(lab, documents):
    (documents / "00.md").rename(documents / "b.md")
    (documents / "10.md").rename(documents / "C.md")
    lab.run_ok(PREFILL)
    assert lab.fake.requests[2]["messages"][0]["content"].endswith(
        "Document 11.\n\nDocument 10.\n\nDocument 0."
    )


@pytest.mark.parametrize(
    "script", ["sse.py", TTFT, PREFILL, f"{PREFILL} --check", CACHE, SENTENCE, EARLY]
)
def test_a_system_prompt_that_can_not_be_used_is_named_and_nothing_is_asked(lab, tmp_path, script):
    lab.serve()
    path = tmp_path / "prompt.txt"
    lab.env["VOICE_LLM_SYSTEM"] = str(path)
    for content, word in (
        (None, "No such file"),
        (b" \n\t", "is blank"),
        (b"Gr\xf6\xdfe", "not UTF-8"),
    ):
        if content is not None:
            path.write_bytes(content)
        lab.run_fails(*script.split(), words=(str(path), word, "VOICE_LLM_SYSTEM"))
    lab.env["VOICE_LLM_SYSTEM"] = str(tmp_path)
    lab.run_fails(*script.split(), words=(str(tmp_path), "not a file", "VOICE_LLM_SYSTEM"))
    assert lab.fake.requests == []


# ---------------------------------------------------------------------------- files


def test_an_output_folder_is_made_with_its_parents(lab):
    lab.serve()
    lab.out = lab.out / "a" / "b"
    lab.env["VOICE_LLM_OUT"] = str(lab.out)
    lab.run_ok("sse.py")
    assert set(lab.files()) == {"sse_raw.txt", "chunks.jsonl"}


@pytest.mark.parametrize("script", ALL)
def test_an_output_folder_that_can_not_be_made_is_found_before_anything_is_measured(
    lab, tmp_path, script
):
    fake = lab.serve()
    (tmp_path / "file").write_text("a file")
    lab.env["VOICE_LLM_OUT"] = str(tmp_path / "file" / "folder")
    lab.failed(lab.run(script), {}, ("VOICE_LLM_OUT", str(tmp_path / "file")))
    assert fake.requests == []


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write into"
)
def test_an_output_folder_that_can_not_be_written_into_is_found_before_anything_is_measured(lab):
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
    """Run a script that can write no file longer than `room` bytes: a write fails just where a full disk would."""
    process = lab.run(sys.executable, "-c", LIMITED, str(room), str(TOP / script))
    process.args = [sys.executable, script]
    return process


@pytest.mark.parametrize("script", ["sse.py", SENTENCE])
def test_a_disk_that_is_full_at_the_start_or_in_the_middle_of_a_write(lab, script):
    lab.serve(token_ms=4)
    before = lab.write_earlier()
    for room in 0, 50:
        lab.failed(run_with_room(lab, room, script), before, ("can't write", str(lab.out)))


def test_two_files_of_one_step_are_written_both_or_none(lab):
    lab.serve(fault="recorded")
    before = lab.write_earlier()
    room = 2000  # enough for chunks.jsonl, and not for sse_raw.txt
    lab.failed(run_with_room(lab, room, "sse.py"), before, ("can't write",))
    (lab.out / "chunks.jsonl").unlink()
    (lab.out / "chunks.jsonl").mkdir()
    process = lab.run("sse.py")
    assert process.returncode == 1
    assert "is a directory" in process.err
    assert (lab.out / "sse_raw.txt").read_bytes() == before["sse_raw.txt"]
    assert sorted(path.name for path in lab.out.iterdir()) == sorted(before)


def test_a_temporary_file_that_an_earlier_process_left_is_no_obstacle(tmp_path):
    path = tmp_path / "result.json"
    pathlib.Path(f"{path}.{os.getpid()}.tmp").write_text("left over")
    sse.save({str(path): {"a": 1}})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------- the terminal


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_result_that_can_not_be_printed_is_a_failure_in_one_line(lab):
    lab.serve()
    with open("/dev/full", "w") as full:
        process = lab.run(SENTENCE, stdout=full)
    assert process.returncode == 1
    assert "Traceback" not in process.err
    assert process.err.splitlines()[-1].startswith(
        "measure_sentence.py: can't print the result (No space left"
    )


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
        process = lab.run(SENTENCE, stderr=full)
    assert process.returncode == 0
    assert lab.read("sentence.json")


def test_progress_does_not_go_to_stdout_where_stderr_is_closed(lab):
    lab.serve()
    closed = lab.run("sh", "-c", f"exec '{sys.executable}' '{TOP / SENTENCE}' 2>&-")
    assert closed.returncode == 0
    assert "the first sentence: " in closed.out
    assert "three sentences" not in closed.out


def test_a_terminal_that_stalls_does_not_stop_the_clock(lab):
    """The pipe to the terminal holds 64 kB, the answer is longer, and nobody reads for a while."""
    lab.serve(fault="long_answer")
    process = lab.start("sse.py")
    time.sleep(2.5)
    process.communicate(timeout=20)
    assert process.returncode == 0
    chunks = [
        json.loads(line) for line in (lab.out / "chunks.jsonl").read_text("utf-8").splitlines()
    ]
    assert len(chunks) == 30
    assert chunks[-1]["t_ms"] < 1800


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_step_2_though_the_terminal_stalls(lab, signum):
    fake = lab.serve(fault="long_answer")
    process = lab.start("sse.py")  # nobody reads what it prints
    assert eventually(lambda: fake.sent_ms and len(fake.sent_ms[0]) == 30)
    process.send_signal(signum)
    assert process.wait(5) == 128 + signum
    process.communicate()
    assert lab.files() == {}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_failure_is_told_and_the_status_is_1_though_stdout_is_full(lab):
    lab.serve(fault="cut_between_chunks")
    with open("/dev/full", "w") as full:
        process = lab.run(SENTENCE, stdout=full)
    lab.failed(process, {}, ("the connection ended",))


def test_a_failure_in_mid_answer_begins_a_line_of_its_own(lab):
    lab.serve(fault="cut_between_chunks")
    both = lab.run("sse.py", stderr=subprocess.STDOUT).out.splitlines()
    assert both[-2:-1] == ["Please bring your photo"]
    assert both[-1].startswith("sse.py: http://")


# ---------------------------------------------------------------------------- the cut

CUTS = {
    "while fragments flow": {"token_ms": 8},
    "in a stall after five events": {"fault": "stall"},
    "in a stall with Connection: close": {"fault": "stall_close"},
    "among dribbled bytes": {"fault": "dribble"},
}
VOID_CUTS = {
    "among dribbled bytes of the headers": {"fault": "dribble_headers"},
    "before any headers": {"fault": "silence"},
    "after the headers": {"fault": "silence_after_headers"},
    "among comments": {"fault": "only_comments"},
    "while the prompt is computed": {"fault": "late_content"},
}


@pytest.mark.parametrize("when", [*CUTS, *VOID_CUTS])
def test_the_cut_comes_at_500_ms_and_the_server_sees_it(lab, when):
    fake = lab.serve(**{**CUTS, **VOID_CUTS}[when])
    lab.env["VOICE_LLM_TIMEOUT"] = "2"
    process = lab.run(CANCEL)
    assert process.returncode == (when in VOID_CUTS), process.err
    assert ("void" in process.err) == (when in VOID_CUTS)
    assert [request["max_tokens"] for request in fake.requests] == [1, 256]
    assert eventually(lambda: fake.closed_ms and 450 < fake.closed_ms[-1] < 1500), (
        fake.closed_ms,
        process.err,
    )
    if when in CUTS:
        result = lab.read("cancel.json")
        assert 500 <= result["closed_at_ms"] < 1500
        assert abs(fake.closed_ms[-1] - result["closed_at_ms"]) < 300
        sent = len([ms for ms in fake.sent_ms[-1] if ms < result["closed_at_ms"]])
        assert sent - 20 <= result["received_tokens"] <= sent + 1  # some may have been on their way
        assert [line for line in fake.log_lines if "cancel task" in line]


@pytest.mark.parametrize("command", [CANCEL, EARLY])
def test_a_close_that_came_late_because_the_process_was_suspended_is_void(lab, command):
    fake = lab.serve(prompt_ms=0.8, token_ms=20)
    before = lab.write_earlier()
    process = lab.start(*command.split())
    assert eventually(lambda: len(fake.requests) == (1 if command == EARLY else 2))
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    process.out, process.err = process.communicate(timeout=30)
    lab.failed(process, before, ("the close came at ", "void", "suspended"))


def test_someone_elses_request_that_takes_the_slot_at_once_is_not_counted(lab):
    lab.serve(fault="slots_taken", token_ms=8)
    lab.run_ok(CANCEL)
    assert lab.read("cancel.json")["slot_idle_after_ms"] < 1000


def test_where_there_is_no_id_task_the_state_of_the_slot_decides(lab):
    lab.serve(fault="slots_without_id", token_ms=8)
    lab.run_ok(CANCEL)
    assert lab.read("cancel.json")["slot_idle_after_ms"] < 1000


def test_the_slot_counts_as_idle_when_slots_has_said_so_and_not_when_it_was_asked(lab):
    lab.serve(fault="slots_slow", token_ms=8)
    lab.run_ok(CANCEL)
    assert lab.read("cancel.json")["slot_idle_after_ms"] >= 300


def test_a_hang_up_that_nobody_noticed_is_measured_to_the_end_of_the_answer(lab):
    lab.serve(fault="deaf", token_ms=10)
    lab.run_ok(CANCEL)
    result = lab.read("cancel.json")
    rest = (256 - result["received_tokens"]) * result["closed_at_ms"] / result["received_tokens"]
    assert result["slot_idle_after_ms"] > 0.5 * rest


# ---------------------------------------------------------------------------- other people


def occupy(fake, max_tokens):
    """Someone else's request, which holds the slot → its connection."""
    messages = [{"role": "user", "content": "List the numbers from 1 to 300, separated by commas."}]
    body = json.dumps({"messages": messages, "max_tokens": max_tokens, "stream": True}).encode()
    connection = socket.create_connection(fake.http.server_address)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    while not fake.slot.processing:
        time.sleep(0.005)
    return connection


@pytest.mark.parametrize("script", [SENTENCE, CANCEL])
def test_someone_elses_request_is_waited_for_and_not_counted(lab, script):
    fake = lab.serve(token_ms=10)
    with occupy(fake, 150):
        process = lab.run_ok(script)
    assert "busy: waiting" in process.err
    other, ours = fake.sent_ms[0], fake.sent_ms[1]
    assert len(other) == 150
    assert ours[0] < 800  # it did not queue behind the other one, which took 1500 ms


def test_who_waits_for_a_busy_slot_soon_asks_less_than_once_a_second(lab):
    """Asked more often, llama-server would not notice that the other caller has hung up during prefill."""
    fake = lab.serve(fault="slots_busy")
    lab.env["VOICE_LLM_TIMEOUT"] = "4"
    process = lab.run_fails(TTFT, words=("still busy",))
    assert process.err.count("busy: waiting") == 1
    asked = [at - fake.times[0] for at in fake.times]
    assert len([at for at in asked if at < 0.5]) > 10
    late = [at for at in asked if at > 0.6]
    assert 2 <= len(late) <= 4
    assert all(after - before > 1.2 for before, after in zip(late, late[1:-1]))


@pytest.mark.parametrize("script", ALL)
def test_every_request_is_sent_to_an_idle_server(lab, script):
    fake = lab.serve(token_ms=4)
    lab.run_ok(script)
    sent = [n for n, path in enumerate(fake.paths) if path == "/v1/chat/completions"]
    assert all(n and fake.paths[n - 1] == "/slots" for n in sent)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("fault", [None, "silence", "only_comments"])
def test_a_signal_ends_a_script_and_frees_the_server_at_once(lab, signum, status, fault):
    fake = lab.serve(token_ms=100, fault=fault)
    before = lab.write_earlier()
    process = lab.start(TTFT)
    assert eventually(lambda: fake.requests and (fault or fake.sent_ms[0]))
    time.sleep(0.1)
    process.send_signal(signum)
    process.send_signal(signum)  # as from an impatient person
    _, err = process.communicate(timeout=10)
    assert process.returncode == status
    assert "Traceback" not in err
    assert eventually(lambda: len(fake.closed_ms) == 1)
    assert lab.files() == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_is_ending_changes_nothing(lab, signum):
    program = (
        "import atexit, sse, time; atexit.register(time.sleep, 1); sse.run(lambda: print('done'))"
    )
    process = lab.start(sys.executable, "-c", program, cwd=TOP)
    assert process.stdout.readline() == "done\n"
    time.sleep(0.2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


def test_the_fake_lists_its_faults_by_name_and_a_pipe_that_closes_early_is_no_traceback():
    command = [sys.executable, str(TESTS / "fake_server.py"), "--faults"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} == {*faults.CHAT, *faults.SLOTS}
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, encoding="utf-8", check=False
    )
    os.close(write)
    assert process.stderr == ""
