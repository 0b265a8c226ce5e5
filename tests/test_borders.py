"""The definitions that a run alone can't tell apart: a figure's two ends, and the numbers that decide whether it is
written or remarked on, each just at its border. Without a server."""

import contextlib
from types import SimpleNamespace

import pytest

import measure_cache
import measure_cancel
import sse


def refuses(function, *arguments):
    try:
        function(*arguments)
    except sse.Failure:
        return True
    return False


def test_times_are_milliseconds_since_the_start_to_the_microsecond():
    assert sse.Answer._ms(SimpleNamespace(start=2.0), 3.2345678) == 1234.568


@pytest.mark.parametrize(
    ("timings", "words", "warm"),
    [
        ({"cache_n": 0, "prompt_n": 1}, 100, False),
        ({"cache_n": 1, "prompt_n": 99}, 100, True),
        (
            {"prompt_n": 50},
            100,
            False,
        ),  # where the server does not tell, a token for every second word
        ({"prompt_n": 49}, 100, True),
        ({}, 100, False),
    ],
)
def test_with_the_cache_off_an_answer_counts_as_computed(timings, words, warm):
    answer = SimpleNamespace(
        timings=timings, _words=words, cache_prompt=False, received=1, finish_reason="stop"
    )
    answer.total_ms, answer.closed_at_ms = 1.0, None
    assert refuses(sse.Answer._check_whole, answer) == warm
    answer.cache_prompt = True
    assert not refuses(sse.Answer._check_whole, answer)


@pytest.mark.parametrize(("busy", "noted"), [((True, False), False), ((True, True), True)])
def test_a_busy_slot_is_looked_at_twice_20_ms_apart(monkeypatch, busy, noted):
    looks, pauses = iter(busy), []
    monkeypatch.setattr(sse, "notes", {})
    monkeypatch.setattr(
        sse, "slots", lambda: [{"is_processing": False}, {"is_processing": next(looks)}]
    )
    monkeypatch.setattr(sse.time, "sleep", pauses.append)
    answer = SimpleNamespace(first_token_ms=1.0, total_ms=1.0, timings={}, cache_prompt=True)
    sse.note_what_else(answer, [{"t_ms": 1.0}])
    assert ("shared" in sse.notes) == noted
    assert pauses == [0, 0.02]


def test_the_only_slot_is_never_another_one(monkeypatch):
    monkeypatch.setattr(sse, "notes", {})
    monkeypatch.setattr(sse, "slots", lambda: [{"is_processing": True}])
    answer = SimpleNamespace(first_token_ms=1.0, total_ms=1.0, timings={}, cache_prompt=True)
    sse.note_what_else(answer, [{"t_ms": 1.0}])
    assert sse.notes == {}


@pytest.mark.parametrize(
    ("computed", "reused", "other_prompt_n", "words", "warm"),
    [
        (100, 40, 100, 1, False),  # as much as a chat template
        (100, 41, 100, 1, True),
        (900, 100, 900, 1, False),  # a tenth of the prompt
        (900, 101, 900, 1, True),
        (90, None, 140, 1, False),  # nine tenths of the other cold prompt, without a template
        (89, None, 140, 1, True),
        (100, None, 100, 200, False),  # a token for every second word
        (99, None, 100, 200, True),
    ],
)
def test_a_prompt_counts_as_cold(computed, reused, other_prompt_n, words, warm):
    figures = {"prompt_n": computed, "ttft_ms": 1.0}
    assert (
        refuses(measure_cache.check_cold, "first", "word " * words, figures, reused, other_prompt_n)
        == warm
    )


@pytest.mark.parametrize(("second", "noted"), [(899, False), (900, True)])
def test_second_counts_as_not_reused(monkeypatch, second, noted):
    answers = iter([1000, second, 1000])
    monkeypatch.setattr(sse, "notes", {})
    monkeypatch.setattr(sse, "wait_idle", lambda: None)
    monkeypatch.setattr(
        sse, "Answer", lambda *args, **more: contextlib.nullcontext(Answered(total_ms=1.0))
    )
    monkeypatch.setattr(
        measure_cache, "ask", lambda *args: ({"prompt_n": next(answers), "ttft_ms": 1.0}, 0)
    )
    measure_cache.measure(["a"])
    assert ("not reused" in sse.notes) == noted


class Answered(list):
    """A list of fragments, and what else an Answer tells."""

    def __init__(self, *times, **told):
        super().__init__({"t_ms": time, "text": "a"} for time in times)
        self.__dict__.update(told)


def test_the_next_caller_waits_from_the_close_to_the_first_token_of_that_answer(monkeypatch):
    left = Answered(start=100.0, closed_at_ms=103.0, first_token_ms=None, accepted_ms=1.0)
    following = Answered(20.0, 50.0, start=100.5, total_ms=90.0, timings={"prompt_ms": 15.0})
    answers = iter([left, following])
    monkeypatch.setattr(sse, "wait_idle", lambda: None)
    monkeypatch.setattr(sse, "Answer", lambda *args, **more: contextlib.nullcontext(next(answers)))
    assert measure_cancel.during_prefill(["a", "b"]) == {
        "docs": 2,
        "closed_at_ms": 103.0,
        "next_ttft_ms": 417.0,  # 500 ms after the first request, 397 after the close, and 20
        "next_prompt_ms": 15.0,
    }


@pytest.mark.parametrize(
    ("closed_at_ms", "seconds", "late"), [(1000.0, 0.5, False), (1000.1, 0.5, True)]
)
def test_a_close_counts_as_late(closed_at_ms, seconds, late):
    assert (
        refuses(measure_cancel.check_close, SimpleNamespace(closed_at_ms=closed_at_ms), seconds)
        == late
    )


@pytest.mark.parametrize(
    ("times", "noted"),
    [
        (
            (0.0, 1.0, 1.1, 2.0, 2.049),
            False,
        ),  # begin, and then when each look was asked for and answered
        ((0.0, 1.0, 1.1, 2.0, 2.3), True),  # above 50 ms, and above a tenth
        ((0.0, 0.1, 0.1, 0.2, 0.249), False),
        ((0.0, 0.1, 0.1, 0.2, 0.251), True),
        ((0.0, 1.0, 1.0, 1.8, 2.0), False),
        ((0.0, 1.0, 1.0, 1.79, 2.0), True),
    ],
)
def test_the_end_is_the_answer_of_the_look_that_found_the_slot_idle(monkeypatch, times, noted):
    looks, clock = iter([[7], [8]]), iter(times)
    monkeypatch.setattr(sse, "notes", {})
    monkeypatch.setattr(sse, "clock", lambda: next(clock))
    monkeypatch.setattr(sse, "timeout", lambda: 120)
    monkeypatch.setattr(measure_cancel, "at_work", lambda: next(looks))
    assert measure_cancel.end_of(7) == times[-1]
    assert ("slow slots" in sse.notes) == noted
