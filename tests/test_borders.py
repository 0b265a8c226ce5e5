"""The numbers that decide whether a figure is written or remarked on, each just at its border, without a server."""

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
    assert refuses(measure_cache.check_cold, "first", "word " * words, figures, reused, other_prompt_n) == warm


@pytest.mark.parametrize(("closed_at_ms", "seconds", "late"), [(1000.0, 0.5, False), (1000.1, 0.5, True)])
def test_a_close_counts_as_late(closed_at_ms, seconds, late):
    assert refuses(measure_cancel.check_close, SimpleNamespace(closed_at_ms=closed_at_ms), seconds) == late


@pytest.mark.parametrize(
    ("first", "prompt_ms", "times", "total", "predicted_ms", "kinds"),
    [
        (150.0, 100.0, [150.0, 200.0], 200.0, 50.0, set()),  # a first token 50 ms apart
        (151.0, 100.0, [151.0, 200.0], 200.0, 49.0, {"first"}),
        (100.0, 151.0, [100.0, 200.0], 200.0, 100.0, {"first"}),
        (1000.0, 900.0, [1000.0], 1000.0, 0.0, set()),  # a tenth of it
        (1000.0, 899.0, [1000.0], 1000.0, 0.0, {"first"}),
        (100.0, 100.0, [100.0, 200.0], 200.0, 150.0, set()),  # an answer 50 ms apart: held back
        (100.0, 100.0, [100.0, 200.0], 200.0, 151.0, {"answer"}),
        (100.0, 100.0, [100.0, 200.0], 900.0, 50.0, set()),  # or slow to arrive, without the wait for [DONE]
        (100.0, 100.0, [100.0, 200.0], 200.0, 49.0, {"answer"}),
        (100.0, 100.0, [100.0, 1100.0], 1100.0, 1100.0, set()),  # a tenth of it
        (100.0, 100.0, [100.0, 1100.0], 1100.0, 1101.0, {"answer"}),
        (100.0, None, [100.0 + n / 7 for n in range(8)], 500.0, None, {"answer"}),  # eight at once
        (100.0, None, [100.0 + n / 6 for n in range(7)], 500.0, None, set()),
        (100.0, None, [100.0 + n / 6.9 for n in range(8)], 500.0, None, set()),
        (90.0, 90.0, [100.0, 200.0], 200.0, 110.0, {"reasoning"}),
    ],
)
def test_what_is_noted_of_an_answer(monkeypatch, first, prompt_ms, times, total, predicted_ms, kinds):
    monkeypatch.setattr(sse, "notes", {})
    monkeypatch.setattr(sse, "slots", lambda: [])
    told = {"prompt_ms": prompt_ms, "predicted_ms": predicted_ms, "cache_n": 0}
    timings = {key: value for key, value in told.items() if value is not None}
    answer = SimpleNamespace(first_token_ms=first, total_ms=total, timings=timings, cache_prompt=False)
    sse.note_what_else(answer, [{"t_ms": time, "text": "a"} for time in times])
    assert set(sse.notes) == kinds
