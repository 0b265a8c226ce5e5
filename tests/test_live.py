"""What a llama-server does, as far as the suite builds on it.

Against the fake, or with VOICE_LLM_URL=http://127.0.0.1:8080 against a real server: what differs
is a defect of the fake.
"""

import json
import os
import pathlib
import time

import pytest
from conftest import FAST
from fake_server import FakeServer

import sse
from measure_prefill import long_prompt

LONG = long_prompt(path.read_text("utf-8") for path in sorted((pathlib.Path(__file__).parent / "kb").glob("*.md")))
TIMINGS = {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}
RATES = {"prompt_per_token_ms", "prompt_per_second", "predicted_per_token_ms", "predicted_per_second"}
COUNT = [{"role": "user", "content": "List the numbers from 1 to 300, separated by commas."}]


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """The server of VOICE_LLM_URL, idle; where that is unset, the fake."""
    if "VOICE_LLM_URL" in os.environ:
        sse.wait_idle()
        yield
        sse.wait_idle()
    else:
        with FakeServer(**{**FAST, "token_ms": 5.0}) as fake:
            monkeypatch.setenv("VOICE_LLM_URL", fake.url)
            yield


def raw_events(messages, **options):
    """The lines of an answer, as a list; and its events, parsed."""

    class Lines(list):
        write = list.append

    lines = Lines()
    sse.stream(messages, raw_out=lines, **options)
    return lines, [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def slots():
    status, body = sse.get("/slots")
    assert status == 200
    return json.loads(body)


def test_health_is_ok_and_props_name_model_context_and_slots():
    assert [status for status, _ in map(sse.get, ["/health", "/props", "/nowhere"])] == [200, 200, 404]
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
    chunks, total_ms, timings = sse.stream(sse.chat(sse.SYSTEM, sse.QUESTION), max_tokens=8, cache_prompt=False)
    assert set(timings) == TIMINGS | RATES
    assert timings["cache_n"] == 0
    assert timings["predicted_n"] == 8
    assert 20 < timings["prompt_n"] < 100
    assert 0 < timings["prompt_ms"] <= chunks[0]["t_ms"]
    assert timings["prompt_ms"] + timings["predicted_ms"] <= total_ms


def test_an_answer_that_ends_by_itself_counts_the_token_that_ends_it():
    chunks, _, timings = sse.stream(sse.chat(sse.SYSTEM, sse.QUESTION), max_tokens=64)
    assert timings["predicted_n"] == len(chunks) + 1


def test_headers_come_long_before_the_first_token():
    with sse.Answer(sse.chat(LONG, "Hello?"), max_tokens=2, cache_prompt=False) as answer:
        receive, headers_ms = answer.receive, []

        def note():
            response = receive()
            headers_ms.append(answer.ms())
            return response

        answer.receive = note
        chunks = list(answer)
    assert headers_ms[0] < chunks[0]["t_ms"] / 2


def test_slots_tell_whether_a_request_is_processed():
    [slot] = slots()
    assert slot["is_processing"] is False
    assert slot["n_ctx"] == 4096
    with sse.Answer(COUNT, max_tokens=256) as answer:
        next(iter(answer))
        assert [slot["is_processing"] for slot in slots()] == [True]
    sse.wait_idle(required=True)
    assert [slot["is_processing"] for slot in slots()] == [False]


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


def test_without_the_cache_the_whole_prompt_is_computed_again():
    counts = [sse.stream(sse.chat(sse.SYSTEM, "Hello?"), 2, cache_prompt=False)[2]["prompt_n"] for _ in range(2)]
    assert counts[0] == counts[1] > 20


def test_closing_the_connection_stops_generation_within_a_few_tokens():
    with sse.Answer(COUNT, max_tokens=256, cut_after=0.8) as answer:
        received = len(list(answer))
    sse.wait_idle(required=True)
    assert answer.ms() - answer.closed_at_ms < 300
    assert 0 < received < 250
    assert not answer.ended


def test_closing_during_prefill_stops_nothing_before_the_prompt_is_computed():
    system = " ".join(LONG.split()[::-1])  # nothing in the slot is the same
    _, _, timings = sse.stream(sse.chat(LONG, "Hello?"), 2, cache_prompt=False)
    prefill_ms = timings["prompt_ms"]
    with sse.Answer(sse.chat(system, "Hello?"), cache_prompt=False, cut_after=prefill_ms / 10_000) as answer:
        assert list(answer) == []
    time.sleep(prefill_ms / 5_000)
    assert sse.slot_busy()
    sse.wait_idle(required=True)
    assert answer.ms() > prefill_ms / 2


def test_a_prompt_longer_than_the_context_is_refused_in_the_servers_words():
    with pytest.raises(sse.Failure, match=r"answered 400: request \(\d+ tokens\) exceeds the available context size"):
        sse.stream(sse.chat("word " * 6000, "Hello?"))


def test_a_request_that_is_none_is_refused_as_json():
    with sse.Request("POST", "/v1/chat/completions", '{"stream": true}') as request:
        assert request.receive().status == 400
        error = json.loads(request.body())["error"]
    assert error == {"code": 400, "message": "'messages' is required", "type": "invalid_request_error"}
