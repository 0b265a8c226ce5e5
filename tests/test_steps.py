"""Each step as the lab asks for it: what it sends, what it writes, what it says."""

import json

import pytest
from conftest import TESTS, TOP, at_once
from fake_server import ANSWERS, tokenize

S = "You are a clinic phone assistant. Answer in one short sentence."
SATURDAY = "When is the clinic open on Saturday?"
DOCUMENTS = [path.read_text("utf-8").strip() for path in sorted((TESTS / "kb").glob("*.md"))]
STEPS = {
    "sse.py": "chunks.jsonl",
    "measure_ttft.py": "ttft.json",
    "measure_prefill.py": "prefill.json",
    "measure_cache.py": "cache.json",
    "measure_sentence.py": "sentence.json",
    "measure_cancel.py": "cancel.json",
}


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


def test_step_1_saves_health_and_props_just_as_they_came(lab):
    fake = lab.serve()
    lab.good("sse.py", "--server")
    assert lab.read("health.json") == {"status": "ok"}
    assert lab.read("props.json") == fake.props()


def test_step_1_waits_for_a_server_that_is_still_loading(lab):
    lab.serve(loading=0.7)
    process = lab.good("sse.py", "--server")
    assert process.seconds > 0.5
    assert "waiting" in process.err
    assert lab.read("health.json") == {"status": "ok"}


def test_step_2_keeps_every_line_and_every_fragment_with_its_time(lab):
    fake = lab.serve(fault="recorded")
    lab.good("sse.py")
    raw = (lab.out / "sse_raw.txt").read_bytes()
    assert raw == (TESTS / "recorded" / "llama-server-b11434.txt").read_bytes()
    chunks = [json.loads(line) for line in (lab.out / "chunks.jsonl").read_text("utf-8").splitlines()]
    assert all(set(chunk) == {"t_ms", "text"} for chunk in chunks)
    texts = [
        json.loads(line[6:])["choices"][0]["delta"].get("content") for line in raw.split(b"\n") if b'"delta"' in line
    ]
    assert [chunk["text"] for chunk in chunks] == [text for text in texts if text]
    times = [chunk["t_ms"] for chunk in chunks]
    assert times == sorted(times)
    assert fake.requests == [body(S, "What should a new patient bring?", 64, True)]


def test_step_2_shows_the_answer(lab):
    lab.serve()
    process = lab.good("sse.py")
    assert process.out.startswith(ANSWERS["What should a new patient bring?"] + "\n")


def test_ttft_sends_the_question_five_times_with_the_cache_off(lab):
    fake = lab.serve()
    lab.good("measure_ttft.py")
    assert fake.requests == [body(S, "What should a new patient bring?", 64, False)] * 5


def test_ttft_writes_five_runs_and_the_third_of_each_sorted_time(lab):
    lab.serve()
    lab.good("measure_ttft.py")
    result = lab.read("ttft.json")
    assert set(result) == {"runs", "ttft_p50", "total_p50"}
    assert len(result["runs"]) == 5
    tokens = len(tokenize(ANSWERS["What should a new patient bring?"])) + 1  # and the one that ends the answer
    for run in result["runs"]:
        assert set(run) == {"ttft_ms", "total_ms", "tokens"}
        assert 0 < run["ttft_ms"] < run["total_ms"]
        assert run["tokens"] == tokens
    assert result["ttft_p50"] == sorted(run["ttft_ms"] for run in result["runs"])[2]
    assert result["total_p50"] == sorted(run["total_ms"] for run in result["runs"])[2]


def test_tokens_are_the_servers_count_and_not_the_number_of_fragments(lab):
    lab.serve(fault="batched")
    lab.good("measure_ttft.py")
    tokens = len(tokenize(ANSWERS["What should a new patient bring?"])) + 1
    assert {run["tokens"] for run in lab.read("ttft.json")["runs"]} == {tokens}


def test_prefill_sends_0_4_and_12_documents_in_the_order_of_their_names(lab):
    fake = lab.serve()
    lab.good("measure_prefill.py")
    prompts = [request["messages"][0]["content"] for request in fake.requests]
    assert prompts == ["\n\n".join([S, *DOCUMENTS[:docs]]) for docs in (0, 4, 12)]
    assert fake.requests == [body(prompt, SATURDAY, 32, False) for prompt in prompts]


def test_prefill_writes_the_servers_count_and_time_of_the_prompt(lab):
    lab.serve(prompt_ms=0.1)
    lab.good("measure_prefill.py")
    rows = lab.read("prefill.json")
    assert [row["docs"] for row in rows] == [0, 4, 12]
    for row in rows:
        assert set(row) == {"docs", "prompt_n", "prompt_ms", "ttft_ms"}
        assert row["prompt_n"] * 0.1 <= row["prompt_ms"] <= row["ttft_ms"]
    assert rows[0]["prompt_n"] < rows[1]["prompt_n"] < rows[2]["prompt_n"]
    assert rows[0]["ttft_ms"] < rows[1]["ttft_ms"] < rows[2]["ttft_ms"]


def test_cache_sends_hi_then_the_long_prompt_twice_then_the_time_in_front(lab):
    fake = lab.serve()
    lab.good("measure_cache.py")
    long_prompt = "\n\n".join([S, *DOCUMENTS])
    assert fake.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert fake.requests[0]["max_tokens"] < 10
    assert fake.requests[1:] == [
        body(long_prompt, SATURDAY, 32, True),
        body(long_prompt, SATURDAY, 32, True),
        body("Current time: 14:05. " + long_prompt, SATURDAY, 32, True),
    ]


def test_cache_writes_a_hit_that_computes_little_and_a_changed_prefix_that_computes_all(lab):
    lab.serve(prompt_ms=0.1)
    lab.good("measure_cache.py")
    result = lab.read("cache.json")
    assert list(result) == ["first", "second", "changed_prefix"]
    assert all(set(figures) == {"prompt_n", "ttft_ms"} for figures in result.values())
    assert result["second"]["prompt_n"] == 1
    assert result["changed_prefix"]["prompt_n"] > 0.9 * result["first"]["prompt_n"] > 1000
    assert result["second"]["ttft_ms"] < result["first"]["ttft_ms"]
    assert result["second"]["ttft_ms"] < result["changed_prefix"]["ttft_ms"]


def test_changed_suffix_is_one_more_request_between_second_and_changed_prefix(lab):
    fake = lab.serve(prompt_ms=0.1)
    lab.good("measure_cache.py", "--changed-suffix")
    prompts = [request["messages"][0]["content"] for request in fake.requests[1:]]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[0] + "\nCurrent time: 14:05."
    assert prompts[3] == "Current time: 14:05. " + prompts[0]
    result = lab.read("cache.json")
    assert set(result) == {"first", "second", "changed_suffix", "changed_prefix"}
    assert 1 < result["changed_suffix"]["prompt_n"] < 100
    assert result["changed_suffix"]["ttft_ms"] < result["changed_prefix"]["ttft_ms"]


def test_sentence_sends_the_three_sentence_prompt(lab):
    fake = lab.serve()
    lab.good("measure_sentence.py")
    system = "You are a clinic phone assistant. Answer in exactly three short sentences."
    [request] = fake.requests
    assert request == body(system, "How do I prepare for a fasting blood test?", 120, True)


def test_sentence_writes_the_time_at_which_the_first_sentence_was_complete(lab):
    lab.serve(token_ms=20)
    lab.good("measure_sentence.py")
    result = lab.read("sentence.json")
    assert set(result) == {"ttft_ms", "first_sentence_ms", "total_ms", "first_sentence", "text"}
    assert result["text"] == ANSWERS["How do I prepare for a fasting blood test?"]
    assert result["first_sentence"] == "Eat nothing for ten hours before the test."
    # The token after the mark brings the space: one behind those of the sentence, of which the first took no time.
    tokens = len(tokenize(result["first_sentence"]))
    assert result["first_sentence_ms"] >= result["ttft_ms"] + 0.95 * 20 * tokens
    assert result["first_sentence_ms"] < result["total_ms"] - 5 * 20


@pytest.mark.parametrize(
    ("texts", "sentence", "fragment"),
    [
        (["Come at 9. Bring", " ID."], "Come at 9.", 0),
        (["Come at 9.", " Bring ID."], "Come at 9.", 1),
        (["Come", "?", "\n", "Yes"], "Come?", 2),
        (["It is 3.5", " km! ", "Go."], "It is 3.5 km!", 1),
        (["Only one sentence", "."], "Only one sentence.", None),
        (["No mark at all"], "No mark at all", None),
        (["Wait...", " what"], "Wait...", 1),
        ([" Leading space. ", "More."], " Leading space.", 0),
        (["Yes.\u3000次"], "Yes.", 0),
    ],
)
def test_a_sentence_ends_at_the_first_mark_with_white_space_behind_it(texts, sentence, fragment):
    from measure_sentence import first_sentence

    chunks = [{"t_ms": 10.0 * n, "text": text} for n, text in enumerate(texts)]
    assert first_sentence(chunks, 99.0) == (sentence, 99.0 if fragment is None else 10.0 * fragment)


def test_cancel_asks_for_a_long_answer_and_writes_what_came_before_the_close(lab):
    fake = lab.serve(token_ms=10)
    lab.good("measure_cancel.py")
    assert fake.requests == [body(None, "List the numbers from 1 to 300, separated by commas.", 256, True)]
    result = lab.read("cancel.json")
    assert set(result) == {"max_tokens", "received_tokens", "closed_at_ms", "slot_idle_after_ms"}
    assert result["max_tokens"] == 256
    assert 20 < result["received_tokens"] < 60
    assert result["closed_at_ms"] >= 500
    assert 0 <= result["slot_idle_after_ms"] < 180


def test_during_prefill_closes_before_the_first_token_and_waits_until_the_prompt_is_computed(lab):
    fake = lab.serve(prompt_ms=0.6)
    lab.good("measure_cancel.py", "--during-prefill")
    [request] = fake.requests
    assert request == body("\n\n".join([S, *DOCUMENTS]), SATURDAY, 64, False)
    result = lab.read("cancel_prefill.json")
    assert set(result) == {"docs", "received_tokens", "closed_at_ms", "slot_idle_after_ms"}
    assert (result["docs"], result["received_tokens"]) == (len(DOCUMENTS), 0)
    assert 100 <= result["closed_at_ms"] < 400
    assert result["slot_idle_after_ms"] > 400  # of about 900 ms of prefill


def test_during_prefill_is_void_where_a_token_came_first(lab):
    lab.serve(token_ms=10)
    before = lab.earlier()
    process = lab.run("measure_cancel.py", "--during-prefill")
    assert process.returncode == 1
    assert "first token came before the close" in process.err
    assert lab.files() == before


@pytest.mark.parametrize("script", [*STEPS, "report.py"])
def test_help_tells_the_step_and_the_settings_without_the_network(lab, script):
    lab.env["VOICE_LLM_URL"] = "http://127.0.0.1:9"
    process = lab.good(script, "--help")
    for word in (
        "Step ",
        "VOICE_LLM_URL",
        "VOICE_LLM_OUT",
        "VOICE_LLM_KB",
        "VOICE_LLM_TIMEOUT",
        "default http://127.0.0.1:8080",
        "default /root/voice/llm",
        "default /opt/lab/fixtures/voice/kb",
        "default 120",
    ):
        assert word in process.out
    assert STEPS.get(script, "report.json") in process.out
    assert not lab.out.exists()


@pytest.mark.parametrize("script", [*STEPS, "report.py"])
def test_an_unknown_option_exits_with_2(lab, script):
    process = lab.run(script, "--nonsense")
    assert process.returncode == 2
    assert "--nonsense" in process.err


def test_a_step_says_what_it_does_on_stderr_and_its_result_and_file_on_stdout(tmp_path):
    def says(lab, script):
        lab.serve(token_ms=4)
        process = lab.good(script)
        assert process.err.strip(), script
        assert process.out.rstrip().endswith(str(lab.out / STEPS[script]))
        assert " ms" in process.out, script

    at_once(tmp_path, [(script,) for script in STEPS], says)


def test_files_are_indented_utf_8_with_characters_as_they_are(lab):
    lab.serve(fault="split_characters")
    lab.good("measure_sentence.py")
    text = (lab.out / "sentence.json").read_text("utf-8")
    assert "診療は九時から。 🙂 OK." in text
    assert text.startswith('{\n  "ttft_ms"')


def test_the_product_imports_the_standard_library_and_itself_only():
    import ast
    import sys

    own = {path.stem for path in TOP.glob("*.py")}
    standard = getattr(sys, "stdlib_module_names", None)
    for path in TOP.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name in own or standard is None or name.partition(".")[0] in standard, (path.name, name)


def test_the_suite_measures_what_the_fake_was_told_to_take(lab):
    """A time is at least what the fake was told, and at most what the fake's own clock says that it took."""
    reading = 25  # ms for a reader that has to wait for its turn on a busy machine
    fake = lab.serve(prompt_ms=0.25, token_ms=8)
    lab.good("measure_prefill.py")
    for row, sent in zip(lab.read("prefill.json"), fake.sent_ms):
        assert row["prompt_n"] * 0.25 <= row["prompt_ms"] <= row["ttft_ms"] <= sent[0] + reading
    fake.sent_ms.clear()
    lab.good("measure_ttft.py")
    for run, sent in zip(lab.read("ttft.json")["runs"], fake.sent_ms):
        assert 0.25 * 50 <= run["ttft_ms"] <= sent[0] + reading
        assert 8 * (run["tokens"] - 1) <= run["total_ms"] - run["ttft_ms"] + reading
        assert run["total_ms"] <= sent[-1] + 8 + reading
