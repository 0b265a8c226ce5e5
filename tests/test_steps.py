"""Each step as the lab asks for it: what it sends, what it writes, what it says."""

import ast
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest
from conftest import HANG, STEPS, TESTS, TOP, eventually, reserved_port
from fake_server import ANSWERS, render, tokenize

import measure_cancel

SYSTEM = "You are a clinic phone assistant. Answer in one short sentence."
THREE_SENTENCES = "You are a clinic phone assistant. Answer in exactly three short sentences."
BRING = "What should a new patient bring?"
SATURDAY = "When is the clinic open on Saturday?"
BLOOD_TEST = "How do I prepare for a fasting blood test?"
COUNTING = "List the numbers from 1 to 300, separated by commas."
CHAT = "/v1/chat/completions"
SUFFIX, EARLY = "measure_cache.py --changed-suffix", "measure_cancel.py --during-prefill"
WITH_DOCUMENTS = ["measure_prefill.py", "measure_cache.py", EARLY]
DOCUMENTS = [path.read_text("utf-8").strip() for path in sorted((TESTS / "kb").glob("*.md"))]
BRING_TOKENS = len(tokenize(ANSWERS[BRING])) + 1  # and the one that ends the answer


def body(system, question, max_tokens, cache_prompt):
    messages = [{"role": "user", "content": question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {
        "messages": messages,
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 7,
        "cache_prompt": cache_prompt,
    }


def assert_sent(fake, *bodies, idle=True):
    """The requests, with their keys in the lab's order, each to a server just seen to be idle."""
    assert fake.requests == list(bodies)
    assert all(list(request) == list(bodies[0]) for request in fake.requests)
    sent = [number for number, path in enumerate(fake.paths) if path == CHAT]
    assert not idle or all(n and fake.paths[n - 1] == "/slots" for n in sent)


# ---------------------------------------------------------------------------- steps 1 and 2


def test_step_1_saves_health_and_props_just_as_they_came(lab):
    fake = lab.serve()
    lab.run_ok("sse.py", "--server")
    assert (lab.out / "health.json").read_bytes() == b'{"status": "ok"}'
    assert (lab.out / "props.json").read_bytes() == json.dumps(fake.props()).encode()


def test_step_1_waits_for_a_server_that_is_still_loading(lab):
    fake = lab.serve(loading=3600)
    process = lab.start("sse.py", "--server")
    assert eventually(lambda: fake.paths.count("/health") >= 3)
    fake.ready_at = 0
    assert lab.ended(process).err == "the server is not ready yet: waiting\n"
    assert lab.read("health.json") == {"status": "ok"}


def test_step_1_waits_for_a_server_that_was_just_started(lab):
    with reserved_port() as port:
        lab.env["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
        process = lab.start("sse.py", "--server")
        assert process.stderr.readline() == "the server is not ready yet: waiting\n"
        lab.serve(port=port)
        assert lab.ended(process).returncode == 0, process.err


def test_step_2_keeps_every_line_and_every_fragment_with_its_time(lab):
    fake = lab.serve(fault="recorded")
    lab.run_ok("sse.py")
    raw = (lab.out / "sse_raw.txt").read_bytes()
    assert raw == (TESTS / "recorded" / "llama-server-b11434.txt").read_bytes()
    chunks = [
        json.loads(line) for line in (lab.out / "chunks.jsonl").read_text("utf-8").splitlines()
    ]
    assert all(set(chunk) == {"t_ms", "text"} for chunk in chunks)
    texts = [
        json.loads(line[6:])["choices"][0]["delta"].get("content")
        for line in raw.split(b"\n")
        if b'"delta"' in line
    ]
    assert [chunk["text"] for chunk in chunks] == [text for text in texts if text]
    times = [chunk["t_ms"] for chunk in chunks]
    assert times == sorted(times)
    assert_sent(fake, body(SYSTEM, BRING, 64, False))


def test_step_2_shows_the_answer(lab):
    lab.serve()
    lines = lab.run_ok("sse.py").out.splitlines()
    assert lines[0] == ANSWERS[BRING]
    chunks = [
        json.loads(line) for line in (lab.out / "chunks.jsonl").read_text("utf-8").splitlines()
    ]
    assert lines[1].startswith(f"first token {chunks[0]['t_ms']:.1f} ms, whole answer ")
    assert lines[1].endswith(f", {len(chunks)} fragments")


# ---------------------------------------------------------------------------- step 3


def assert_first(times, sent):
    """Each time is that of the first token: the second comes 300 ms later.

    The clock of the fake begins a little later than the script's, so a time is never below the
    fake's; how much it is above it tells how busy the machine is. Late by 300 ms each time is no
    such chance.
    """
    assert all(time >= tokens[0] for time, tokens in zip(times, sent))
    assert any(time < tokens[1] for time, tokens in zip(times, sent))


def test_ttft_sends_the_question_five_times_with_the_cache_off(lab):
    fake = lab.serve()
    lab.run_ok("measure_ttft.py")
    assert_sent(fake, *[body(SYSTEM, BRING, 64, False)] * 5)


def test_ttft_writes_five_runs_and_the_third_of_each_sorted_time(lab):
    """Each run is held up for a time of its own, first tokens and ends in another order."""
    fake = lab.serve(fault="paced")
    lab.run_ok("measure_ttft.py")
    result = lab.read("ttft.json")
    assert list(result) == ["runs", "ttft_p50", "total_p50"]
    assert len(result["runs"]) == 5
    for run, sent, pause_ms in zip(result["runs"], fake.sent_ms, (40, 100, 20, 80, 60)):
        assert list(run) == ["ttft_ms", "total_ms", "tokens"]
        assert run["total_ms"] >= sent[-1] + pause_ms  # until [DONE]
        assert run["tokens"] == BRING_TOKENS
    assert_first([run["ttft_ms"] for run in result["runs"]], fake.sent_ms)
    assert len({run["ttft_ms"] for run in result["runs"]}) == 5
    assert result["ttft_p50"] == sorted(run["ttft_ms"] for run in result["runs"])[2]
    assert result["total_p50"] == sorted(run["total_ms"] for run in result["runs"])[2]


@pytest.mark.parametrize("fault", ["batched", "timings_apart", "timings_per_token"])
def test_tokens_are_the_servers_last_count_and_not_the_number_of_fragments(lab, fault):
    lab.serve(fault=fault)
    lab.run_ok("measure_ttft.py")
    assert {run["tokens"] for run in lab.read("ttft.json")["runs"]} == {BRING_TOKENS}


# ---------------------------------------------------------------------------- step 4


def test_prefill_sends_0_4_and_12_documents_in_the_order_of_their_names(lab):
    fake = lab.serve()
    lab.run_ok("measure_prefill.py")
    prompts = ["\n\n".join([SYSTEM, *DOCUMENTS[:docs]]) for docs in (0, 4, 12)]
    assert_sent(fake, *(body(prompt, SATURDAY, 32, False) for prompt in prompts))


def test_prefill_writes_the_servers_count_and_time_of_the_prompt(lab):
    fake = lab.serve(prompt_ms=0.1, fault="slow_second")
    lab.run_ok("measure_prefill.py")
    rows = lab.read("prefill.json")
    assert [row["docs"] for row in rows] == [0, 4, 12]
    for row in rows:
        assert list(row) == ["docs", "prompt_n", "prompt_ms", "ttft_ms"]
        assert row["prompt_n"] * 0.1 <= row["prompt_ms"] <= row["ttft_ms"]
    assert_first([row["ttft_ms"] for row in rows], fake.sent_ms)
    assert rows[0]["prompt_n"] < rows[1]["prompt_n"] < rows[2]["prompt_n"]


def test_check_asks_nothing_writes_nothing_and_says_nothing(lab):
    fake = lab.serve()
    process = lab.run_ok("measure_prefill.py", "--check")
    assert (process.out, process.err, fake.paths, lab.files()) == ("", "", [], {})
    assert not lab.out.exists()


# ---------------------------------------------------------------------------- step 5


def test_cache_sends_hi_then_the_long_prompt_twice_then_the_time_in_front(lab):
    fake = lab.serve()
    err = lab.run_ok("measure_cache.py").err
    prompt = "\n\n".join([SYSTEM, *DOCUMENTS])
    again = body(prompt, SATURDAY, 32, True)
    changed = body("Current time: 14:05. " + prompt, SATURDAY, 32, True)
    assert_sent(fake, body(None, "hi", 4, True), again, again, changed)
    assert "1 token computed" in err
    assert "1 tokens" not in err


def test_cache_writes_a_hit_that_computes_little_and_a_miss_that_computes_all(lab):
    fake = lab.serve(prompt_ms=0.1, fault="slow_second")
    lab.run_ok("measure_cache.py")
    result = lab.read("cache.json")
    assert list(result) == ["first", "second", "changed_prefix"]
    assert all(list(figures) == ["prompt_n", "ttft_ms"] for figures in result.values())
    assert_first([figures["ttft_ms"] for figures in result.values()], fake.sent_ms[1:])
    assert result["second"]["prompt_n"] == 1
    assert result["changed_prefix"]["prompt_n"] > 0.9 * result["first"]["prompt_n"] > 1000


def test_changed_suffix_is_one_more_request_between_second_and_changed_prefix(lab):
    fake = lab.serve(prompt_ms=0.1)
    lab.run_ok("measure_cache.py", "--changed-suffix")
    prompts = [request["messages"][0]["content"] for request in fake.requests[1:]]
    assert prompts == [
        prompts[0],
        prompts[0],
        prompts[0] + "\nCurrent time: 14:05.",
        "Current time: 14:05. " + prompts[0],
    ]
    result = lab.read("cache.json")
    assert list(result) == ["first", "second", "changed_suffix", "changed_prefix"]
    assert 1 < result["changed_suffix"]["prompt_n"] < 100


# ---------------------------------------------------------------------------- step 6


def test_sentence_sends_the_three_sentence_prompt_with_the_cache_off(lab):
    fake = lab.serve()
    lab.run_ok("measure_sentence.py")
    assert_sent(fake, body(THREE_SENTENCES, BLOOD_TEST, 120, False))


def test_sentence_writes_the_time_at_which_the_first_sentence_was_complete(lab):
    fake = lab.serve(fault="slow_sentences")
    lab.run_ok("measure_sentence.py")
    result = lab.read("sentence.json")
    assert list(result) == ["ttft_ms", "first_sentence_ms", "total_ms", "first_sentence", "text"]
    assert (result["text"], result["first_sentence"]) == ("Come at 9. Bring ID.", "Come at 9.")
    [(first, _, space, last)] = fake.sent_ms  # 1.5 s before the space, and again behind it
    assert first <= result["ttft_ms"] < space
    assert space <= result["first_sentence_ms"] < last <= result["total_ms"]


# ---------------------------------------------------------------------------- step 7


def test_the_hang_ups_are_those_of_the_lab():
    """In the tests they come later: a busy machine may need as long for a first token."""
    assert (measure_cancel.CUT, measure_cancel.EARLY_CUT, measure_cancel.LATE) == (0.5, 0.1, 0.5)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("measure_cancel.py", "one token, so that the prompt is in the KV cache ... "),
        ("measure_cache.py", "hi, so that the slot holds another prompt ... "),
    ],
)
def test_what_is_asked_to_prepare_a_measurement_is_said_before_it(lab, script, said):
    lab.serve(prompt_ms=10_000)
    process = lab.start(script)
    assert eventually(lambda: lab.fake.requests)
    process.terminate()
    assert lab.ended(process).err == said


def test_cancel_fills_the_cache_and_writes_what_came_before_the_close(lab):
    fake = lab.serve(token_ms=20)
    lab.run_ok("measure_cancel.py")
    assert_sent(fake, body(None, COUNTING, 1, True), body(None, COUNTING, 256, True))
    result = lab.read("cancel.json")
    assert list(result) == ["max_tokens", "received_tokens", "closed_at_ms", "slot_idle_after_ms"]
    assert result["max_tokens"] == 256
    assert 0 < result["received_tokens"] <= len(fake.sent_ms[1]) < 256
    assert result["closed_at_ms"] >= 1000 * lab.cut
    assert result["slot_idle_after_ms"] >= 0
    # While tokens flow it looks at the slots once: a look costs the server time.
    asked = len(fake.paths) - 1 - fake.paths[::-1].index(CHAT)
    half = fake.times[asked] + fake.closed_ms[-1] / 2000
    assert len([at for at in fake.times[asked + 1 :] if at < half]) <= 1


LONG_PREFILL = {"prompt_ms": 2, "silence": 0.3}  # about 3 s, and hung up on after one


def during_prefill(lab, **options):
    """→ the fake, the result, the tokens of the prompt, how many of them were computed."""
    fake = lab.serve(**{**LONG_PREFILL, **options})
    lab.run_ok("measure_cancel.py", "--during-prefill")
    prompt = len(tokenize(render(fake.requests[0]["messages"])))
    released = [line for line in fake.log_lines if "release" in line]
    return fake, lab.read("cancel_prefill.json"), prompt, int(released[0].split()[-1])


def test_during_prefill_measures_what_the_next_caller_waits(lab):
    """Here the whole prompt is one batch, which is not interrupted."""
    fake, result, prompt, computed = during_prefill(lab)
    system = "\n\n".join([SYSTEM, *DOCUMENTS])
    bodies = body(system, SATURDAY, 64, False), body(None, "hi", 4, False)
    assert_sent(fake, *bodies, idle=False)
    assert list(result) == ["docs", "closed_at_ms", "next_ttft_ms", "next_prompt_ms"]
    assert result["docs"] == len(DOCUMENTS)
    assert result["closed_at_ms"] >= 1000 * min(lab.cut, 1)
    assert computed == prompt
    hi_ms = 2 * len(tokenize(render(fake.requests[1]["messages"])))
    assert result["next_prompt_ms"] >= hi_ms
    assert result["next_ttft_ms"] >= 2 * prompt - result["closed_at_ms"] + hi_ms > 0


def test_during_prefill_a_small_batch_frees_the_slot_before_the_prompt_ends(lab):
    fake, _, prompt, computed = during_prefill(lab, batch=64)
    assert computed < prompt
    # Nobody has looked at the slots between the close and the answer.
    first = fake.paths.index(CHAT)
    assert fake.paths[first : first + 2] == [CHAT] * 2


def test_the_fake_notices_no_hang_up_in_prefill_while_somebody_polls_slots(lab):
    def look():
        while not ended.wait(0.05):
            with contextlib.suppress(OSError):  # between two servers
                urllib.request.urlopen(f"{lab.env['VOICE_LLM_URL']}/slots").close()

    ended = threading.Event()
    lab.serve()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        _, _, prompt, computed = during_prefill(lab, batch=64, silence=1.5)
    finally:
        ended.set()
        looking.join()
    assert computed == prompt


# ---------------------------------------------------------------------------- a prompt of one's own


def test_a_prompt_and_a_question_of_ones_own_are_sent_in_steps_2_to_6(lab, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf\n Speak like a pirate.\r\nBe short. \n\n")
    lab.env["VOICE_LLM_SYSTEM"] = str(tmp_path / "prompt.txt")
    lab.env["VOICE_LLM_QUESTION"] = "Où est la clinique ?\nMerci."  # the second line: --call
    pirate, ask = "Speak like a pirate.\nBe short.", "Où est la clinique ?"
    prompt = "\n\n".join([pirate, *DOCUMENTS])
    fake = lab.serve(**LONG_PREFILL, batch=64, token_ms=20)
    lab.run_ok("measure_cancel.py", "--during-prefill")
    assert fake.requests[0] == body(prompt, ask, 64, False)
    fake = lab.serve(token_ms=20)
    lab.run_ok("measure_cancel.py")
    assert_sent(fake, body(None, COUNTING, 1, True), body(None, COUNTING, 256, True))
    fake = lab.serve()
    lab.run_ok("sse.py")
    lab.run_ok("measure_ttft.py")
    assert_sent(fake, *[body(pirate, ask, 64, False)] * 6)
    fake.requests.clear()
    lab.run_ok("measure_prefill.py")
    assert_sent(
        fake, *(body("\n\n".join([pirate, *DOCUMENTS[:n]]), ask, 32, False) for n in (0, 4, 12))
    )
    fake.requests.clear()
    lab.run_ok("measure_cache.py", "--changed-suffix")
    systems = [prompt, prompt, f"{prompt}\nCurrent time: 14:05.", f"Current time: 14:05. {prompt}"]
    assert_sent(
        fake, body(None, "hi", 4, True), *(body(system, ask, 32, True) for system in systems)
    )
    fake.requests.clear()
    lab.run_ok("measure_sentence.py")
    assert_sent(fake, body(pirate, ask, 120, False))


def test_blank_settings_are_as_if_unset(lab):
    lab.env.update(VOICE_LLM_SYSTEM="", VOICE_LLM_QUESTION=" \t")
    fake = lab.serve()
    lab.run_ok("measure_sentence.py")
    assert_sent(fake, body(THREE_SENTENCES, BLOOD_TEST, 120, False))


# ---------------------------------------------------------------------------- the documents


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
    lab.run_fails("measure_prefill.py", words=("11 documents", str(documents), "12"))
    lab.run_fails("measure_prefill.py", "--check", words=("11 documents",))
    lab.run_ok("measure_cache.py")
    assert lab.fake.requests


def test_no_documents_a_missing_folder_or_a_document_that_can_not_be_read(lab, documents):
    def fails(script, *words):
        lab.run_fails(*script.split(), words=words)

    (documents / "05.md").write_bytes("Größe".encode("latin-1"))
    for script in WITH_DOCUMENTS:
        fails(script, str(documents / "05.md"), "not UTF-8", "convert it to UTF-8")
    (documents / "05.md").unlink()
    (documents / "05.md").mkdir()
    fails("measure_cache.py", str(documents / "05.md"), "not a file")
    lab.env["VOICE_LLM_KB"] = str(documents / "05.md")
    fails("measure_prefill.py", "no *.md", "VOICE_LLM_KB")
    lab.env["VOICE_LLM_KB"] = str(documents / "nowhere")
    fails("measure_cache.py", str(documents / "nowhere"), "No such file", "VOICE_LLM_KB")
    assert lab.fake.requests == []


def test_a_bom_crlf_and_other_files_are_fine_and_empty_documents_are_named(lab, documents):
    (documents / "00.md").write_bytes(b"\xef\xbb\xbfOne\r\ntwo\r\n")
    (documents / "01.md").write_bytes(b"")
    (documents / "._02.md").write_bytes(b"\xff")
    (documents / "readme.txt").write_bytes(b"\xff")
    for script in "measure_cache.py", "measure_prefill.py":
        [note] = lab.run_ok(script).notes
        assert note.startswith("note: empty")
        assert note.endswith(": 01.md")
        prompt = lab.fake.requests[-1]["messages"][0]["content"]
        assert "\n\nOne\ntwo\n\n\n\nDocument 2.\n\n" in prompt
    assert lab.read("prefill.json")[2]["docs"] == 12


def test_step_4_reads_and_names_only_the_documents_that_it_sends(lab, documents):
    (documents / "12.md").write_bytes(b"")
    (documents / "13.md").write_bytes(b"\xff")
    assert lab.run_ok("measure_prefill.py").notes == []
    lab.run_fails("measure_prefill.py", "--check", words=("13.md", "not UTF-8"))  # step 5 sends all


def test_documents_are_in_the_order_of_their_names_as_bytes(lab, documents):
    (documents / "00.md").rename(documents / "b.md")
    (documents / "10.md").rename(documents / "C.md")
    lab.run_ok("measure_prefill.py")
    prompt = lab.fake.requests[2]["messages"][0]["content"]
    assert prompt.endswith("Document 11.\n\nDocument 10.\n\nDocument 0.")


def test_a_system_prompt_that_can_not_be_used_is_named_and_nothing_is_asked(lab, tmp_path):
    lab.serve()
    path = tmp_path / "prompt.txt"

    def fails(script, *words):
        lab.env["VOICE_LLM_SYSTEM"] = str(path)
        lab.run_fails(*script.split(), words=(str(path), *words, "VOICE_LLM_SYSTEM"))

    fails("measure_ttft.py", "No such file")
    path.write_bytes(b"Gr\xf6\xdfe")
    fails("measure_sentence.py", "not UTF-8")
    path.write_bytes(b" \n\t")
    scripts = ["sse.py", "measure_ttft.py", "measure_sentence.py", "measure_prefill.py --check"]
    for script in [*scripts, *WITH_DOCUMENTS]:
        fails(script, "is blank")
    path = tmp_path
    fails("measure_prefill.py", "not a file")
    assert lab.fake.requests == []


# ---------------------------------------------------------------------------- on the terminal

SCRIPTS = [*STEPS, "report.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_tells_the_step_and_the_settings_on_80_columns_without_the_network(lab, script):
    lab.env["VOICE_LLM_URL"] = "http://127.0.0.1:9"
    process = lab.run_ok(script, "--help")
    words = (
        "Step ",
        "URL",
        "OUT",
        "KB",
        "SYSTEM",
        "QUESTION",
        "TIMEOUT",
        "default http://127.0.0.1:8080",
    )
    for word in (
        *words,
        "default /root/voice/llm",
        "default /opt/lab/fixtures/voice/kb",
        "default 120",
    ):
        assert word in process.out
    assert STEPS.get(script, "report.json") in process.out
    assert max(map(len, process.out.splitlines())) <= 80
    assert not lab.out.exists()


@pytest.mark.parametrize("script", ["measure_cache.py", "report.py"])
def test_an_unknown_option_exits_with_2(lab, script):
    process = lab.run(script, "--nonsense")
    assert process.returncode == 2
    assert "--nonsense" in process.err


def test_every_script_can_be_executed():
    for script in SCRIPTS:
        assert os.access(TOP / script, os.X_OK), script


@pytest.mark.parametrize("script", [*STEPS, SUFFIX, EARLY])
def test_a_pipe_gets_the_table_on_stdout_and_progress_on_stderr(lab, script):
    """And there is nothing to note of a healthy server."""
    lab.serve(token_ms=20, **({**LONG_PREFILL, "batch": 64} if script == EARLY else {}))
    process = lab.run_ok(*script.split())
    file = "cancel_prefill.json" if script == EARLY else STEPS[script.split()[0]]
    *_, last = process.out.splitlines()
    assert last.startswith("wrote ")
    assert file in last
    assert str(lab.out) in last
    assert " ms" in process.out
    assert process.notes == []
    told = [line for line in process.err.splitlines() if not line.startswith("note: ")]
    if script == "sse.py":
        assert told == [f"asking: {BRING}"]
    else:
        assert all(re.search(r"^\S.* \.\.\. .*\d ms", line) for line in told), process.err


def on_a_terminal(lab, *command):
    """Run a script on a pseudo-terminal → what it shows there, stdout and stderr together."""
    master, slave = pty.openpty()
    process = lab.start(*command, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says EIO at the end
            piece = b""
        if not piece:
            break
        shown += piece
    os.close(master)
    assert process.wait() == 0, shown
    return shown.decode().replace("\r\n", "\n")


FIGURES = {
    "measure_ttft.py": lambda result: [run["total_ms"] for run in result["runs"]],
    "measure_prefill.py": lambda rows: [row["prompt_n"] for row in rows],
    "measure_cache.py": lambda result: [row["ttft_ms"] for row in result.values()],
    "measure_sentence.py": lambda result: [result["first_sentence_ms"], result["total_ms"]],
    "measure_cancel.py": lambda result: [result["closed_at_ms"], result["slot_idle_after_ms"]],
    EARLY: lambda result: list(result.values())[1:],
}


@pytest.mark.parametrize("script", FIGURES)
def test_on_a_terminal_each_figure_stands_once_behind_what_is_asked(lab, script):
    early = script == EARLY
    prefill = {**LONG_PREFILL, "batch": 64} if early else {"prompt_ms": 0.1}
    fault = "paced" if script == "measure_ttft.py" else None
    lab.serve(token_ms=20 if "cancel" in script else 7.3, fault=fault, **prefill)
    shown = on_a_terminal(lab, *script.split())
    values = FIGURES[script](lab.read("cancel_prefill.json" if early else STEPS[script]))
    texts = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
    for text in texts:
        lines = [
            line
            for line in shown.splitlines()
            if re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.])", line)
        ]
        lines = [line for line in lines if not line.startswith(("p50", "note: "))]
        assert len(lines) == texts.count(text), shown
        assert all(" ... " in line for line in lines)


def test_a_step_run_alone_beside_a_report_says_that_the_report_is_older(lab):
    lab.serve()
    assert lab.run_ok("measure_sentence.py").notes == []
    lab.write_earlier()
    older = "note: report.json still has the earlier figures: run report.py"
    assert lab.run_ok("measure_sentence.py").notes == [older]
    lab.env["VOICE_LLM_RUN_ALL"] = "yes"
    assert lab.run_ok("measure_sentence.py").notes == []


def test_files_are_indented_utf_8_with_characters_as_they_are(lab):
    lab.serve(fault="split_characters")
    lab.run_ok("measure_sentence.py")
    text = (lab.out / "sentence.json").read_text("utf-8")
    assert "診療は九時から。 🙂 OK." in text
    assert text.startswith('{\n  "ttft_ms"')


def test_a_path_in_another_script_is_shown_as_characters_on_an_ascii_terminal(lab, tmp_path):
    lab.serve()
    lab.env.update(
        VOICE_LLM_OUT=str(tmp_path / "結果"), LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"
    )
    process = lab.run_ok("measure_sentence.py")
    assert (tmp_path / "結果" / "sentence.json").exists()
    assert "\\u7d50\\u679c" in process.out
    assert "\\udc" not in process.out + process.err


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@needs_full
def test_a_result_that_can_not_be_printed_is_a_failure_in_one_line(lab):
    lab.serve()
    with open("/dev/full", "w") as full:
        process = lab.run("measure_sentence.py", stdout=full)
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
    assert (lab.out / "chunks.jsonl").exists()


@needs_full
def test_progress_that_can_not_be_printed_stops_no_measurement(lab):
    lab.serve()
    with open("/dev/full", "w") as full:
        process = lab.run("measure_sentence.py", stderr=full)
    assert process.returncode == 0
    assert lab.read("sentence.json")


def test_progress_does_not_go_to_stdout_where_stderr_is_closed(lab):
    lab.serve()
    closed = lab.run("sh", "-c", f"exec '{sys.executable}' '{TOP / 'measure_sentence.py'}' 2>&-")
    assert closed.returncode == 0
    assert "the first sentence: " in closed.out
    assert "three sentences" not in closed.out


def test_a_terminal_that_stalls_stops_neither_the_clock_nor_ctrl_c(lab):
    """The pipe to the terminal holds 64 kB, the answer is longer, and nobody reads it."""
    fake = lab.serve(fault="long_answer")
    process = lab.start("sse.py")
    assert eventually(lambda: fake.closed_ms)  # so the whole answer was read
    assert len(lab.ended(process).out.split("\n")[0]) == 30 * 8000
    assert len((lab.out / "chunks.jsonl").read_text().splitlines()) == 30
    for number, signum in enumerate([signal.SIGINT, signal.SIGTERM], 2):
        process = lab.start("sse.py")
        assert eventually(lambda: len(fake.closed_ms) == number)  # noqa: B023
        process.send_signal(signum)
        assert process.wait(HANG) == 128 + signum
        process.communicate()
    assert not list(lab.out.glob("*.tmp"))


@needs_full
def test_a_failure_is_told_and_the_status_is_1_though_stdout_is_full(lab):
    lab.serve(fault="cut_between_chunks")
    with open("/dev/full", "w") as full:
        process = lab.run("measure_sentence.py", stdout=full)
    lab.failed(process, {}, ("the connection ended",))


def test_a_failure_in_mid_answer_begins_a_line_of_its_own(lab):
    lab.serve(fault="cut_between_chunks")
    both = lab.run("sse.py", stderr=subprocess.STDOUT).out.splitlines()
    assert both[-2:-1] == ["Please bring your photo"]
    assert both[-1].startswith("sse.py: http://")


# ---------------------------------------------------------------------------- the suite


def test_the_product_imports_the_standard_library_and_itself_only():
    own = {path.stem for path in TOP.glob("*.py")}
    standard = getattr(sys, "stdlib_module_names", None)
    for path in TOP.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name in own or standard is None or name.partition(".")[0] in standard, (
                    path.name,
                    name,
                )
