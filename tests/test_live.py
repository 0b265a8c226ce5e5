"""What a llama-server does, as far as the suite builds on it.

Against the fake, or with VOICE_LLM_URL=http://127.0.0.1:8080 against a real server: what differs
is a defect of the fake.
"""

import json
import os
import pathlib
import time
import types

import pytest
from conftest import EARNED, FAST
from fake_server import FakeServer

import sse
from measure_prefill import long_prompt

KB = sorted((pathlib.Path(__file__).parent / "kb").glob("*.md"))
LONG = long_prompt([path.read_text("utf-8") for path in KB])
TIMINGS = {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}
RATES = {
    f"{what}_per_{unit}" for what in ("prompt", "predicted") for unit in ("token_ms", "second")
}
REAL = "VOICE_LLM_URL" in os.environ
HI = [{"role": "user", "content": "hi"}]
COUNT = [{"role": "user", "content": "List the numbers from 1 to 300, separated by commas."}]


def idle(task=None):
    """Wait until no slot is processing `task`, or anything."""
    while [slot for slot in slots() if slot["is_processing"] and task in (None, slot["id_task"])]:
        time.sleep(0.003)


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """The server of VOICE_LLM_URL, idle; where that is unset, the fake."""
    monkeypatch.setattr(sse, "notes", {})
    if REAL:
        idle()
        yield types.SimpleNamespace()  # its times are its own
        idle()
    else:
        with FakeServer(**{**FAST, "prompt_ms": 0.3, "token_ms": 5.0, "silence": 0.1}) as fake:
            monkeypatch.setenv("VOICE_LLM_URL", fake.url)
            yield fake.slot


def raw_events(messages, **options):
    """The lines of an answer, as a list; and its events, parsed."""

    class Lines(list):
        write = list.append

    lines = Lines()
    sse.stream(messages, raw_out=lines, **options)
    return lines, [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def slots():
    return sse.slots(required=True)


def test_health_is_ok_and_props_name_model_context_and_slots():
    answers = [sse.get(path) for path in ("/health", "/props", "/nowhere")]
    assert [status for status, _ in answers] == [200, 200, 404]
    assert json.loads(sse.get("/health")[1]) == {"status": "ok"}
    props = json.loads(sse.get("/props")[1])
    assert isinstance(props["model_path"], str)
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] == 1


def test_every_event_is_one_data_line_and_one_blank_line_and_the_last_is_done():
    lines, _ = raw_events(sse.chat(sse.SYSTEM, sse.QUESTION), max_tokens=8)
    lines = [line for line in lines if not line.startswith(b":")]
    assert all(line.startswith(b"data: ") for line in lines[::2])
    assert set(lines[1::2]) == {b"\n"}
    assert lines[-1] == b"data: [DONE]\n"


def test_the_role_comes_first_then_content_then_the_finish_with_the_timings():
    _, events = raw_events(sse.chat(sse.SYSTEM, sse.QUESTION), max_tokens=8, cache_prompt=False)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] in ("length", "stop")
    assert [set(event) - {"timings"} for event in events] == [set(events[0])] * len(events)
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]


def test_timings_have_the_counts_the_times_and_the_rates():
    chunks, total_ms, timings = sse.stream(
        sse.chat(sse.SYSTEM, sse.QUESTION), max_tokens=8, cache_prompt=False
    )
    assert set(timings) == TIMINGS | RATES
    assert timings["cache_n"] == 0
    assert timings["predicted_n"] == 8
    assert 20 < timings["prompt_n"] < 100
    assert 0 < timings["prompt_ms"] <= chunks[0]["t_ms"]
    assert timings["prompt_ms"] + timings["predicted_ms"] <= total_ms


def test_the_token_that_ends_an_answer_by_itself_counts():
    with sse.Answer(sse.chat(sse.SYSTEM, sse.QUESTION), max_tokens=64) as answer:
        fragments = len(list(answer))
    ended_by_itself = answer.finish_reason == "stop"  # a base model goes on
    assert answer.timings["predicted_n"] == fragments + ended_by_itself


def test_with_ignore_eos_an_answer_has_all_its_tokens():
    _, _, timings = sse.stream(sse.chat(sse.SYSTEM, sse.QUESTION), 80, ignore_eos=True)
    assert timings["predicted_n"] == 80


def test_with_timings_per_token_the_first_token_tells_what_was_computed():
    messages = sse.chat(sse.SYSTEM, "Hello?")
    computed = sse.stream(messages, 2, cache_prompt=False)[2]["prompt_n"]
    with sse.Answer(messages, 8, cache_prompt=False, timings_per_token=True) as answer:
        next(iter(answer))
        assert answer.timings["prompt_n"] == computed
        assert answer.timings["cache_n"] == 0
        assert answer.timings["predicted_n"] == 1


def test_headers_come_long_before_the_first_token(server):
    server.prompt_ms = 2
    with sse.Answer(sse.chat(LONG, "Hello?"), max_tokens=2, cache_prompt=False) as answer:
        chunks = list(answer)
    assert answer.accepted_ms < chunks[0]["t_ms"] / 2
    assert answer.first_token_ms == chunks[0]["t_ms"]


def test_the_servers_clock_agrees_with_ours():
    for system, max_tokens in (sse.SYSTEM, 64), (LONG, 8):
        sse.stream(sse.chat(system, "Hello?"), max_tokens, cache_prompt=False)
    told = [text for _, text in sse.notes.values()]
    if REAL:
        assert told == []
    else:  # a machine that is busy with other tests earns a note
        assert not [text for text in told if not any(words in text for words in EARNED)]


def test_slots_tell_whether_a_request_is_processed_and_which(server):
    server.token_ms = 20
    [slot] = slots()
    assert slot["is_processing"] is False
    assert slot["n_ctx"] == 4096
    tasks = []
    for _ in range(2):
        with sse.Answer(COUNT, max_tokens=256) as answer:
            next(iter(answer))
            [slot] = slots()
            assert slot["is_processing"] is True
            tasks.append(slot["id_task"])
        idle(slot["id_task"])
    assert tasks[0] < tasks[1]


def test_the_next_request_has_an_id_of_its_own_though_it_takes_the_slot_at_once(server):
    server.token_ms = 20
    with sse.Answer(COUNT, max_tokens=512) as first:
        next(iter(first))
        [slot] = slots()
        with sse.Answer(COUNT, max_tokens=256) as second:  # it waits in the queue
            time.sleep(0.1)
            first.close()
            next(iter(second))
            [its] = slots()
            assert its["is_processing"] is True
            assert its["id_task"] > slot["id_task"]


def test_the_cache_reuses_what_is_the_same_from_the_first_token_on():
    sse.stream([{"role": "user", "content": "hi"}], max_tokens=4)
    figures = []
    for system in LONG, LONG, LONG + "\nCurrent time: 14:05.", "Current time: 14:05. " + LONG:
        _, _, timings = sse.stream(sse.chat(system, "Hello?"), max_tokens=2)
        figures.append((timings["cache_n"], timings["prompt_n"]))
    first, second, suffix, prefix = figures
    assert first[0] < 20  # what every prompt of the chat template shares
    assert second == (sum(first) - 1, 1)
    assert 1 < suffix[1] < 100
    assert prefix[0] < 20
    assert sum(prefix) > sum(first)


def test_the_turn_after_an_interruption_reuses_the_cut_answer():
    said = ["List the numbers from 1 to 300, separated by commas."]
    with sse.Answer(sse.chat(LONG, *said), 48, ignore_eos=True, timings_per_token=True) as cut:
        heard = ""
        for chunk in cut:
            heard += chunk["text"]
            if cut.received == 5:
                cut.close()
    assert cut.total_ms is None
    _, _, timings = sse.stream(sse.chat(LONG, *said, heard, "Thank you."), 2)
    assert timings["cache_n"] >= cut.timings["prompt_n"] + cut.timings["cache_n"]
    assert timings["prompt_n"] < 100


def test_without_the_cache_the_whole_prompt_is_computed_again():
    counts = [
        sse.stream(sse.chat(sse.SYSTEM, "Hello?"), 2, cache_prompt=False)[2]["prompt_n"]
        for _ in range(2)
    ]
    assert counts[0] == counts[1] > 20


def test_closing_the_connection_stops_generation_long_before_its_end(server):
    server.token_ms = 20
    with sse.Answer(COUNT, 512, ignore_eos=True) as answer:
        for last in answer:  # noqa: B007
            if answer.received == 20:
                answer.close()
    idle()
    idle_ms = (sse.clock() - answer.start) * 1000 - answer.closed_at_ms
    rest_ms = (512 / answer.received - 1) * (last["t_ms"] - answer.first_token_ms)
    assert idle_ms < rest_ms / 2
    assert answer.finish_reason is None


def test_closing_during_prefill_is_noticed_after_a_second_and_its_batch(server):
    """All of this prompt is one batch, or a part of it (Gemma); the fake's second is shorter."""
    server.prompt_ms = 4
    prompt = sse.chat(LONG, "Hello?")
    prefill_ms = sse.stream(prompt, 2, cache_prompt=False)[2]["prompt_ms"]
    with sse.Answer(prompt, cache_prompt=False, cut_after=prefill_ms / 5000) as left:
        assert list(left) == []
    assert left.accepted_ms is not None
    with sse.Answer(HI, max_tokens=2, cache_prompt=False) as following:
        [first_ms, *_] = [chunk["t_ms"] for chunk in following]
    waited_ms = (following.start - left.start) * 1000 + first_ms - left.closed_at_ms
    assert waited_ms > min(prefill_ms / 2, 800)


def test_a_prompt_longer_than_the_context_is_refused_in_the_servers_words():
    with pytest.raises(
        sse.Failure,
        match=r"answered 400: request \(\d+ tokens\) exceeds the available context size",
    ):
        sse.stream(sse.chat("word " * 6000, "Hello?"))
