"""The numbers that decide whether a figure is written or remarked on, each just at its border.

Where it is a time, the clock is the test's own, so no machine is too slow for it."""

import contextlib
import time

import faults
import pytest

import measure_cancel
import sse

CACHE = "measure_cache.py"


def last_event(**timings):
    return {**faults.finish("stop"), "timings": timings}


# ---------------------------------------------------------------------------- the server's clock

NOTED = {
    "first": "a first token took",
    "answer": "an answer came in",
    "at once": "fragments came within 1 ms",
    "reasoning": "reasoning came first",
}


class Raw:
    """A raw_out that is the clock, too: each event has its moment, in ms."""

    def __init__(self, moments):
        self.moments = moments

    def write(self, line):
        if line.startswith(b"data: "):
            self.moments = self.moments[1:] or self.moments

    def clock(self):
        return self.moments[0] / 1000


def noted(lab, monkeypatch, timings, chunks=(1000.0, 2000.0), first=None, total=None):
    """Which of NOTED an answer earns whose fragments come at `chunks`, all in ms."""
    reasoning = [] if first is None else [first]
    last = last_event(**timings) if timings else faults.finish("stop")
    pieces = [faults.ROLE, *[faults.HMM] * len(reasoning), *["x"] * len(chunks), last, faults.DONE]
    raw = Raw([0.0, *reasoning, *chunks, chunks[-1], total or chunks[-1]])
    monkeypatch.setenv("VOICE_LLM_URL", lab.serve(fault=faults.stream(*pieces)).url)
    monkeypatch.setattr(sse, "clock", raw.clock)
    monkeypatch.setattr(sse, "notes", {})
    read, total_ms, _ = sse.stream([{"role": "user", "content": "hi"}], raw_out=raw)
    assert [chunk["t_ms"] for chunk in read] == list(chunks)
    assert total_ms == (total or chunks[-1])
    texts = [text for _, text in sse.notes.values()]
    assert all(any(words in text for words in NOTED.values()) for text in texts)
    return [name for name, words in NOTED.items() if any(words in text for text in texts)]


@pytest.mark.parametrize(
    ("timings", "times", "names"),
    [
        ({"prompt_ms": 901.0, "predicted_ms": 1000.0}, {}, []),
        ({"prompt_ms": 899.0, "predicted_ms": 1000.0}, {}, ["first"]),
        ({"prompt_ms": 1099.0, "predicted_ms": 1000.0}, {}, []),
        ({"prompt_ms": 1101.0, "predicted_ms": 1000.0}, {}, ["first"]),
        ({"prompt_ms": 51.0}, {"chunks": (100.0, 2000.0)}, []),
        ({"prompt_ms": 49.0}, {"chunks": (100.0, 2000.0)}, ["first"]),
        ({"prompt_ms": 1000.0, "predicted_ms": 1099.0}, {}, []),
        ({"prompt_ms": 1000.0, "predicted_ms": 1101.0}, {}, ["answer"]),
        ({"prompt_ms": 1000.0, "predicted_ms": 899.0}, {}, ["answer"]),
        ({"prompt_ms": 1000.0, "predicted_ms": 901.0}, {}, []),
        # The last token has no text; and [DONE] may be late.
        ({"prompt_ms": 1000.0, "predicted_ms": 1500.0}, {"total": 2500.0}, []),
        ({"prompt_ms": 1000.0, "predicted_ms": 1000.0}, {"total": 2500.0}, []),
        ({"prompt_ms": 1000.0, "predicted_ms": 149.0}, {"chunks": (1000.0, 1100.0)}, []),
        ({"prompt_ms": 1000.0, "predicted_ms": 151.0}, {"chunks": (1000.0, 1100.0)}, ["answer"]),
        ({}, {"chunks": (1000.0,) * 8}, ["at once"]),
        ({}, {"chunks": (1000.0,) * 7 + (1001.0,)}, ["at once"]),
        ({}, {"chunks": (1000.0,) * 7 + (1001.1,)}, []),
        ({}, {"chunks": (998.9,) + (1000.0,) * 7}, []),
        ({}, {"chunks": (1000.0,) * 7}, []),
        ({"prompt_ms": "12", "predicted_ms": float("nan")}, {}, []),
        ({"prompt_ms": 1000.0}, {"chunks": (1200.0, 2000.0), "first": 1000.0}, ["reasoning"]),
    ],
)
def test_a_gap_to_the_servers_clock_is_noted_above_50_ms_and_a_tenth(
    lab, monkeypatch, timings, times, names
):
    assert noted(lab, monkeypatch, timings, **times) == names


def test_of_each_kind_of_note_the_largest_is_kept(monkeypatch):
    monkeypatch.setattr(sse, "notes", {})
    for size in 60, 90, 70:
        sse.note("late", f"{size} ms", size)
    sse.note("other", "once")
    assert sse.notes == {"late": (90, "90 ms"), "other": (0, "once")}


# ---------------------------------------------------------------------------- the cache


@pytest.mark.parametrize(
    ("timings", "warm"),
    [
        ({"cache_n": 0, "prompt_n": 1}, False),
        ({"cache_n": 1, "prompt_n": 99}, True),
        ({"prompt_n": 50}, False),  # where the server does not tell, a token for every second word
        ({"prompt_n": 49}, True),
        ({}, False),
    ],
)
def test_a_prompt_of_100_words_counts_as_computed(lab, monkeypatch, timings, warm):
    answer = faults.stream(faults.FIVE, last_event(**timings), faults.DONE)
    monkeypatch.setenv("VOICE_LLM_URL", lab.serve(fault=answer).url)
    messages = [{"role": "user", "content": "word " * 100}]
    found = pytest.raises(sse.Failure, match="cache") if warm else contextlib.nullcontext()
    with found:
        sse.stream(messages, cache_prompt=False)
    assert sse.stream(messages, cache_prompt=True)


def serve_counts(lab, tmp_path, first, second, prefix, words=1):
    """Step 5 with a prompt of as many words, and these timings for its three requests."""

    def answer(wire, events):
        told = [{}, first, second, prefix][len(wire.server.fake.requests) - 1]
        faults.stream(faults.FIVE, last_event(**told), faults.DONE)(wire, events)

    lab.serve(fault=answer)
    (tmp_path / "prompt.txt").write_text("word " * words)
    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / "empty.md").touch()
    lab.env["VOICE_LLM_SYSTEM"] = str(tmp_path / "prompt.txt")
    lab.env["VOICE_LLM_KB"] = str(tmp_path / "kb")


@pytest.mark.parametrize(
    ("first", "prefix", "words", "warm"),
    [
        ({"prompt_n": 100, "cache_n": 40}, 100, 1, False),  # as much as a chat template
        ({"prompt_n": 100, "cache_n": 41}, 100, 1, True),
        ({"prompt_n": 900, "cache_n": 100}, 900, 1, False),  # a tenth of the prompt
        ({"prompt_n": 900, "cache_n": 101}, 900, 1, True),
        ({"prompt_n": 90}, 140, 1, False),  # nine tenths of the other cold prompt, and a template
        ({"prompt_n": 89}, 140, 1, True),
        ({"prompt_n": 100}, 102, 200, False),  # a token for every second word
        ({"prompt_n": 99}, 102, 200, True),
    ],
)
def test_a_prompt_counts_as_cold(lab, tmp_path, first, prefix, words, warm):
    serve_counts(lab, tmp_path, first, {"prompt_n": 1}, {"prompt_n": prefix}, words)
    if warm:
        lab.run_fails(CACHE, words=("first was answered from a cache",))
    else:
        lab.run_ok(CACHE)


@pytest.mark.parametrize(("second", "told"), [(899, False), (900, True)])
def test_second_counts_as_not_reused(lab, tmp_path, second, told):
    serve_counts(lab, tmp_path, *({"prompt_n": count} for count in (1000, second, 1000)))
    assert any("second reused nothing" in note for note in lab.run_ok(CACHE).notes) == told


# ---------------------------------------------------------------------------- the hang-up


class Answered(list):
    """A list of fragments, and what else an Answer tells."""

    def __init__(self, *times, **told):
        super().__init__({"t_ms": t_ms, "text": "a"} for t_ms in times)
        self.timings, self.cache_prompt, self.max_tokens, self.finish_reason = {}, True, 256, None
        self.__dict__.update(told)


def answer_with(monkeypatch, *answers):
    queue = iter(answers)
    context = contextlib.nullcontext
    monkeypatch.setattr(sse, "Answer", lambda *args, **more: context(next(queue)))


def test_the_next_caller_waits_from_the_close_to_the_first_token(lab, monkeypatch):
    monkeypatch.setenv("VOICE_LLM_URL", lab.serve().url)
    left = Answered(start=100.0, closed_at_ms=103.0, first_token_ms=None, accepted_ms=1.0)
    following = Answered(20.0, 50.0, start=100.5, first_token_ms=20.0, total_ms=90.0)
    following.timings = {"prompt_ms": 15.0, "cache_n": 0}
    answer_with(monkeypatch, left, following)
    assert measure_cancel.during_prefill(["a", "b"]) == {
        "docs": 2,
        "closed_at_ms": 103.0,
        "next_ttft_ms": 417.0,  # 500 ms after the first request, 397 after the close, and 20
        "next_prompt_ms": 15.0,
    }


class Cut(Answered):
    """An answer that is closed at 500 ms, behind its first fragment."""

    def __iter__(self):
        yield from super().__iter__()
        self.closed_at_ms, self.time.now = 500.0, 0.5


@pytest.mark.parametrize(
    ("busy", "look", "told"),
    [(0, 0.04, False), (0, 0.3, True), (50, 0.3, False), (10, 0.3, True)],
)
def test_a_slow_look_at_the_slots_is_noted_above_50_ms_and_a_tenth(monkeypatch, busy, look, told):
    """The slot counts as idle when the look that found it so was answered."""

    class Time:
        now = 0.0

    def sleep(seconds):
        Time.now += seconds

    def slots(required=False):
        task, seconds = next(looks)
        sleep(seconds)
        return [{"is_processing": task is not None, "id_task": task}]

    looks = iter([(None, 0), (None, 0), (7, 0), *[(7, 0.1)] * busy, (None, look)])
    monkeypatch.setattr(sse, "slots", slots)
    monkeypatch.setattr(sse, "clock", lambda: Time.now)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sse, "notes", {})
    told_of = {"accepted_ms": 1.0, "first_token_ms": 1.0, "finish_reason": None, "total_ms": None}
    cut = Cut(1.0, start=0.0, received=1, closed_at_ms=None, time=Time, **told_of)
    answer_with(monkeypatch, Answered(total_ms=1.0), cut)
    idle_ms = measure_cancel.during_generation()["slot_idle_after_ms"]
    assert idle_ms == pytest.approx(1000 * (busy * 0.103 + look))
    assert any("may have been idle" in text for _, text in sse.notes.values()) == told
