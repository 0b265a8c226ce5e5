"""Each step as the lab asks for it: what it sends, what it writes, what it says."""

import ast
import json
import os
import pty
import re
import sys
import threading
import time
import urllib.request

import pytest
from conftest import STEPS, TESTS, TOP, eventually
from fake_server import ANSWERS, tokenize

SYSTEM = "You are a clinic phone assistant. Answer in one short sentence."
THREE_SENTENCES = "You are a clinic phone assistant. Answer in exactly three short sentences."
BRING = "What should a new patient bring?"
SATURDAY = "When is the clinic open on Saturday?"
BLOOD_TEST = "How do I prepare for a fasting blood test?"
COUNTING = "List the numbers from 1 to 300, separated by commas."
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


def assert_sent(fake, *bodies):
    """The requests, with their keys in the lab's order."""
    assert fake.requests == list(bodies)
    assert all(list(request) == list(bodies[0]) for request in fake.requests)


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
    _, err = process.communicate(timeout=20)
    assert err == "the server is not ready yet: waiting\n"
    assert lab.read("health.json") == {"status": "ok"}


def test_step_1_waits_for_a_server_that_was_just_started(lab):
    fake = lab.serve()
    port = fake.http.server_address[1]
    lab.close()
    later = threading.Timer(0.8, lambda: lab.serve(port=port))
    later.start()
    lab.run_ok("sse.py", "--server")
    later.join()


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


def test_ttft_sends_the_question_five_times_with_the_cache_off(lab):
    fake = lab.serve()
    lab.run_ok("measure_ttft.py")
    assert_sent(fake, *[body(SYSTEM, BRING, 64, False)] * 5)


def test_ttft_writes_five_runs_and_the_third_of_each_sorted_time(lab):
    """Runs 1 to 5 are held up for a time of their own, the first token and the end each in another order."""
    fake = lab.serve(fault="paced")
    lab.run_ok("measure_ttft.py")
    result = lab.read("ttft.json")
    assert list(result) == ["runs", "ttft_p50", "total_p50"]
    assert len(result["runs"]) == 5
    for run, sent in zip(result["runs"], fake.sent_ms):
        assert list(run) == ["ttft_ms", "total_ms", "tokens"]
        assert sent[0] - 50 <= run["ttft_ms"] < sent[1]
        assert run["total_ms"] > sent[-1]
        assert run["tokens"] == BRING_TOKENS
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
    for row, sent in zip(rows, fake.sent_ms):
        assert list(row) == ["docs", "prompt_n", "prompt_ms", "ttft_ms"]
        assert row["prompt_n"] * 0.1 <= row["prompt_ms"] <= row["ttft_ms"]
        assert sent[0] - 50 <= row["ttft_ms"] < sent[1]
    assert rows[0]["prompt_n"] < rows[1]["prompt_n"] < rows[2]["prompt_n"]


def test_check_asks_nothing_writes_nothing_and_says_nothing(lab):
    fake = lab.serve()
    process = lab.run_ok("measure_prefill.py", "--check")
    assert (process.out, process.err, fake.paths, lab.files()) == ("", "", [], {})
    assert not lab.out.exists()


# ---------------------------------------------------------------------------- step 5


def test_cache_sends_hi_then_the_long_prompt_twice_then_the_time_in_front(lab):
    fake = lab.serve()
    lab.run_ok("measure_cache.py")
    prompt = "\n\n".join([SYSTEM, *DOCUMENTS])
    again = body(prompt, SATURDAY, 32, True)
    changed = body("Current time: 14:05. " + prompt, SATURDAY, 32, True)
    assert_sent(fake, body(None, "hi", 4, True), again, again, changed)


def test_cache_writes_a_hit_that_computes_little_and_a_changed_prefix_that_computes_all(lab):
    fake = lab.serve(prompt_ms=0.1, fault="slow_second")
    lab.run_ok("measure_cache.py")
    result = lab.read("cache.json")
    assert list(result) == ["first", "second", "changed_prefix"]
    for figures, sent in zip(result.values(), fake.sent_ms[1:]):
        assert list(figures) == ["prompt_n", "ttft_ms"]
        assert sent[0] - 50 <= figures["ttft_ms"] < sent[1]
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
    fake = lab.serve(token_ms=60)
    lab.run_ok("measure_sentence.py")
    result = lab.read("sentence.json")
    assert list(result) == ["ttft_ms", "first_sentence_ms", "total_ms", "first_sentence", "text"]
    assert result["text"] == ANSWERS[BLOOD_TEST]
    assert result["first_sentence"] == "Eat nothing for ten hours before the test."
    [sent] = fake.sent_ms
    after = len(tokenize(result["first_sentence"]))  # the token behind the mark brings the space
    assert sent[0] - 50 <= result["ttft_ms"] < sent[1]
    assert sent[after] - 50 <= result["first_sentence_ms"] < sent[after + 2]
    assert result["total_ms"] > sent[-1]


SENTENCES = [
    (["Come at 9. Bring", " ID."], "Come at 9.", 0),
    (["Come at 9.", " Bring ID."], "Come at 9.", 1),
    (["Come", "?", "\n", "Yes"], "Come?", 2),
    (["It is 3.5", " km! ", "Go."], "It is 3.5 km!", 1),
    (["Only one sentence", "."], "Only one sentence.", None),
    (["No mark at all"], "No mark at all", None),
    (["Wait...", " what"], "Wait...", 1),
    ([" Leading space. ", "More."], " Leading space.", 0),
    (["Yes.\u3000次"], "Yes.", 0),
]


@pytest.mark.parametrize(("texts", "sentence", "fragment"), SENTENCES)
def test_a_sentence_ends_at_the_first_mark_with_white_space_behind_it(texts, sentence, fragment):
    from measure_sentence import first_sentence

    chunks = [{"t_ms": 10.0 * n, "text": text} for n, text in enumerate(texts)]
    assert first_sentence(chunks, 99.0) == (sentence, 99.0 if fragment is None else 10.0 * fragment)


# ---------------------------------------------------------------------------- step 7


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("measure_cancel.py", "one token, so that the prompt is in the KV cache ... "),
        ("measure_cache.py", "hi, so that the slot holds another prompt ... "),
    ],
)
def test_what_is_asked_to_prepare_a_measurement_is_said_before_it(lab, script, said):
    lab.serve(fault="silence")
    process = lab.start(script)
    assert eventually(lambda: lab.fake.requests)
    process.terminate()
    assert process.communicate(timeout=20)[1] == said


def test_cancel_warms_the_cache_asks_for_a_long_answer_and_writes_what_came_before_the_close(lab):
    fake = lab.serve(token_ms=10)
    lab.run_ok("measure_cancel.py")
    assert_sent(fake, body(None, COUNTING, 1, True), body(None, COUNTING, 256, True))
    result = lab.read("cancel.json")
    assert list(result) == ["max_tokens", "received_tokens", "closed_at_ms", "slot_idle_after_ms"]
    assert result["max_tokens"] == 256
    sent = len([ms for ms in fake.sent_ms[1] if ms < result["closed_at_ms"]])
    assert sent - 20 <= result["received_tokens"] <= sent + 1
    assert result["closed_at_ms"] >= 500
    assert 0 <= result["slot_idle_after_ms"] < 600


def test_while_tokens_flow_it_looks_at_the_slots_once_and_polls_only_after_the_close(lab):
    fake = lab.serve(token_ms=10)
    lab.run_ok("measure_cancel.py")
    asked = len(fake.paths) - 1 - fake.paths[::-1].index("/v1/chat/completions")
    begin, closed_ms = fake.times[asked], fake.closed_ms[-1]
    during = [at for at in fake.times[asked + 1 :] if (at - begin) * 1000 < closed_ms - 50]
    assert len(during) == 1


PREFILL_CUT = {"prompt_ms": 0.8, "silence": 0.3}  # about 1250 ms of prefill


def during_prefill(lab, **options):
    fake = lab.serve(**{**PREFILL_CUT, **options})
    lab.run_ok("measure_cancel.py", "--during-prefill")
    return fake, lab.read("cancel_prefill.json")


def test_during_prefill_measures_what_the_next_caller_waits_with_one_batch_the_whole_prompt(lab):
    fake, result = during_prefill(lab, token_ms=200)
    prompt = "\n\n".join([SYSTEM, *DOCUMENTS])
    assert_sent(fake, body(prompt, SATURDAY, 64, False), body(None, "hi", 4, False))
    assert list(result) == ["docs", "closed_at_ms", "next_ttft_ms", "next_prompt_ms"]
    assert result["docs"] == len(DOCUMENTS)
    assert 100 <= result["closed_at_ms"] < 500
    begin, asked = (
        at for at, path in zip(fake.times, fake.paths) if path == "/v1/chat/completions"
    )
    from_close = (asked - begin) * 1000 - result["closed_at_ms"]
    assert -50 < from_close < 300
    assert abs(result["next_ttft_ms"] - from_close - fake.sent_ms[1][0]) < 100
    assert result["next_ttft_ms"] > 700
    assert 20 < result["next_prompt_ms"] < 200


def test_during_prefill_a_small_batch_frees_the_slot_after_the_silence(lab):
    _, result = during_prefill(lab, batch=64)
    assert result["next_ttft_ms"] < 700


def test_during_prefill_nobody_looks_at_the_slots_between_the_close_and_the_answer(lab):
    fake, _ = during_prefill(lab, batch=64)
    first = fake.paths.index("/v1/chat/completions")
    assert fake.paths[first : first + 2] == ["/v1/chat/completions"] * 2


def test_the_fake_notices_no_hang_up_during_prefill_while_somebody_looks_at_the_slots(lab):
    fake = lab.serve(**PREFILL_CUT, batch=64)
    process = lab.start("measure_cancel.py", "--during-prefill")
    while process.poll() is None:
        urllib.request.urlopen(f"{fake.url}/slots").close()
        time.sleep(0.02)
    process.communicate()
    assert lab.read("cancel_prefill.json")["next_ttft_ms"] > 700


# ---------------------------------------------------------------------------- a prompt of one's own


def test_a_system_prompt_and_a_question_of_ones_own_are_sent_in_steps_2_to_6_in_place_of_the_labs(
    lab, tmp_path
):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf\n Speak like a pirate.\r\nBe short. \n\n")
    lab.env["VOICE_LLM_SYSTEM"] = str(tmp_path / "prompt.txt")
    lab.env["VOICE_LLM_QUESTION"] = "Où est la clinique ?"
    pirate, ask = "Speak like a pirate.\nBe short.", "Où est la clinique ?"
    prompt = "\n\n".join([pirate, *DOCUMENTS])
    fake = lab.serve(prompt_ms=0.3, token_ms=10)
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
    fake.requests.clear()
    lab.run_ok("measure_cancel.py")
    assert_sent(fake, body(None, COUNTING, 1, True), body(None, COUNTING, 256, True))
    fake.requests.clear()
    lab.run_ok("measure_cancel.py", "--during-prefill")
    assert fake.requests[0] == body(prompt, ask, 64, False)


def test_blank_settings_are_as_if_unset(lab):
    lab.env.update(VOICE_LLM_SYSTEM="", VOICE_LLM_QUESTION=" \t")
    fake = lab.serve()
    lab.run_ok("measure_sentence.py")
    assert_sent(fake, body(THREE_SENTENCES, BLOOD_TEST, 120, False))


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


@pytest.mark.parametrize("script", STEPS)
def test_a_pipe_gets_the_table_and_the_file_on_stdout_and_progress_with_its_figure_on_stderr(
    lab, script
):
    lab.serve(token_ms=4)
    process = lab.run_ok(script)
    assert process.out.rstrip().endswith(str(lab.out / STEPS[script]))
    assert " ms" in process.out
    if script == "sse.py":
        assert process.err == f"asking: {BRING}\n"
    else:
        assert all(re.search(r"^\S.* \.\.\. .*\d ms", line) for line in process.err.splitlines()), (
            process.err
        )


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
    "measure_cancel.py --during-prefill": lambda result: list(result.values())[1:],
}


@pytest.mark.parametrize("script", FIGURES)
def test_on_a_terminal_each_figure_appears_once_in_the_line_that_said_what_was_asked(lab, script):
    early = "--during-prefill" in script
    lab.serve(
        prompt_ms=0.3 if early else 0.1,
        token_ms=7.3,
        fault="paced" if script == "measure_ttft.py" else None,
    )
    shown = on_a_terminal(lab, *script.split())
    values = FIGURES[script](lab.read("cancel_prefill.json" if early else STEPS[script]))
    texts = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
    for text in texts:
        lines = [
            line
            for line in shown.splitlines()
            if re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.])", line)
        ]
        lines = [line for line in lines if not line.startswith("p50")]
        assert len(lines) == texts.count(text), shown
        assert all(" ... " in line for line in lines)


def test_counts_of_one_have_no_s(lab):
    lab.serve(prompt_ms=0.1)
    err = lab.run_ok("measure_cache.py").err
    assert "1 token computed" in err
    assert "1 tokens" not in err


def test_a_step_run_alone_beside_a_report_says_that_the_report_is_older(lab):
    lab.serve(token_ms=4)
    lab.run_ok("measure_sentence.py")
    lab.write_earlier()
    process = lab.run_ok("measure_sentence.py")
    assert (
        process.err.splitlines()[-1]
        == "note: report.json still has the earlier figures: run report.py"
    )
    lab.env["VOICE_LLM_RUN_ALL"] = "yes"
    assert "report" not in lab.run_ok("measure_sentence.py").err


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


def test_the_suite_measures_what_the_fake_was_told_to_take(lab):
    """A time is at least what the fake was told, and at most what the fake's own clock says that it took."""
    reading = 60  # ms for a reader that has to wait for its turn on a busy machine
    fake = lab.serve(prompt_ms=0.25, token_ms=8)
    lab.run_ok("measure_prefill.py")
    for row, sent in zip(lab.read("prefill.json"), fake.sent_ms):
        assert row["prompt_n"] * 0.25 <= row["prompt_ms"] <= row["ttft_ms"] <= sent[0] + reading
    fake.sent_ms.clear()
    lab.run_ok("measure_ttft.py")
    for run, sent in zip(lab.read("ttft.json")["runs"], fake.sent_ms):
        assert 0.25 * 50 <= run["ttft_ms"] <= sent[0] + reading
        assert 8 * (run["tokens"] - 1) <= run["total_ms"] - run["ttft_ms"] + reading
        assert run["total_ms"] <= sent[-1] + 8 + reading
