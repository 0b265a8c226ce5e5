"""What a good reader doesn't notice: streams that are right, but not the usual ones."""

import io
import threading

import bench_lag
import faults
import pytest
from conftest import eventually

import sse

COUNTING = "List the numbers from 1 to 300, separated by commas."
HI = [{"role": "user", "content": "hi"}]


def test_the_raw_file_has_the_comments_and_the_blank_lines_too(lab):
    lab.serve(fault="comments")
    lab.run_ok("sse.py")
    raw = (lab.out / "sse_raw.txt").read_bytes()
    assert raw.startswith(b":\n\n: keep-alive\n\ndata: {")
    assert raw.count(b": data: {not an event}\n") == raw.count(b"data: {") // 2


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("line_separators", "One\u2028two\u0085three\x0cfour\u2029five. End."),
        ("split_characters", "診療は九時から。 🙂 OK."),
        ("long_line", "Long. " + "x" * 3_000_000),
        ("half_surrogates", "Fine 😀. Bye."),
        ("bad_utf_8", "\ufffd. Bye."),
    ],
    ids=lambda value: value[:16],
)
def test_a_text_of_unusual_characters_or_length_arrives_whole(lab, fault, text):
    lab.serve(fault=fault)
    lab.run_ok("measure_sentence.py")
    assert (
        lab.read("sentence.json")["text"].encode("utf-16", "surrogatepass").decode("utf-16") == text
    )


def test_what_a_model_says_can_not_steer_the_terminal(lab):
    lab.serve(fault="terminal_codes")
    for script in "sse.py", "measure_sentence.py":
        process = lab.run_ok(script)
        assert "\\x1b[2J" in process.out
        assert all(c.isprintable() or c == "\n" for c in process.out + process.err)
        assert "\\nthere" in process.out or "there\\n" in process.out


def test_the_answer_is_shown_on_a_terminal_that_knows_ascii_only(lab):
    lab.serve(fault="split_characters")
    lab.env["PYTHONIOENCODING"] = "ascii"
    assert "\\u8a3a" in lab.run_ok("sse.py").out


# ---------------------------------------------------------------------------- the standard's rules

EVENTS = [
    (b"data: a\n\n", [b"a"]),
    (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
    (b"data: a\ndata: b\n\n", [b"a\nb"]),
    (b"data: a\r\n\r\n", [b"a"]),
    (b":c\ndata: a\n: c\n\n:\n\n", [b"a"]),
    (b"id: 1\nretry: 5\nevent: message\nfoo\nfoo: x\ndata: a\n\nid\n\n", [b"a"]),
    (b"event:\ndata: a\n\n", [b"a"]),
    (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
    (b"data\n\ndata:\n\ndata:  \n\n", []),
    (b"data: a\n\ndata: b\n", [b"a"]),
    (b"data: a\rdata: b\n\n", [b"a\rdata: b"]),
    (b"data: [DONE]", [b"[DONE]"]),
    (b"data: [DONE]\n\n", [b"[DONE]"]),
    (b"data:  [DONE] \r\n", [b"[DONE]"]),
    (b"data: [DONE]\n\ndata: a\n\n", [b"[DONE]"]),
    (b"data: a\ndata: [DONE]\n\n", [b"a\n[DONE]"]),
]


@pytest.mark.parametrize(("stream", "expected"), EVENTS)
def test_events_follow_the_standard_but_for_done(stream, expected):
    lines = [(0, line) for line in io.BytesIO(stream)]
    assert list(sse.events(lines)) == [(0, b"message", value) for value in expected]


def test_an_error_line_or_bare_json_is_an_event_of_type_error():
    lines = [(1, b'error: {"a": 1}\n'), (2, b'{"b": 2}\n')]
    assert list(sse.events(lines)) == [(1, b"error", b'{"a": 1}'), (2, b"error", b'{"b": 2}')]


def test_the_type_of_an_event_lasts_until_its_blank_line():
    lines = [(0, line) for line in (b"event: x\n", b"data: a\n", b"\n", b"data: b\n", b"\n")]
    assert list(sse.events(lines)) == [(0, b"x", b"a"), (0, b"message", b"b")]


def test_an_event_has_the_time_of_its_last_data_line():
    lines = [(1, b"data: a\n"), (2, b"data: b\n"), (3, b": c\n"), (4, b"\n")]
    assert list(sse.events(lines)) == [(2, b"message", b"a\nb")]


# ---------------------------------------------------------------------------- as a module


@pytest.fixture
def recorded(lab, monkeypatch):
    monkeypatch.setenv("VOICE_LLM_URL", lab.serve(fault="recorded").url)
    monkeypatch.setattr(sse, "notes", {})


def test_stream_returns_fragments_the_whole_time_and_the_timings(recorded):
    chunks, total_ms, timings = sse.stream(HI)
    assert 0 < chunks[0]["t_ms"] <= chunks[-1]["t_ms"] < total_ms
    assert timings["prompt_n"] == 34


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "hi"}]])
def test_a_message_may_have_any_content_that_the_api_allows(recorded, content):
    assert sse.stream([{"role": "user", "content": content}])[0]


def test_stream_writes_every_line_to_a_path_a_binary_file_or_a_text_file(recorded, tmp_path):
    sse.stream(HI, raw_out=str(tmp_path / "a"))
    sse.stream(HI, raw_out=tmp_path / "b")
    with open(tmp_path / "c", "wb") as file:
        sse.stream(HI, raw_out=file)
    with open(tmp_path / "d", "w") as file:
        sse.stream(HI, raw_out=file)
    for name in "abcd":
        assert (tmp_path / name).read_bytes() == faults.RECORDED.read_bytes()


def test_a_fragment_and_the_end_have_the_time_at_which_they_were_read(lab, monkeypatch):
    """The server sends each line when the one before has been read."""
    gate = threading.Semaphore(0)
    wait = [lambda wire, events: gate.acquire()]
    tokens = [piece for text in ("One.", " Two", ".") for piece in (*wait, text)]
    pieces = [*tokens, faults.finish("stop"), *wait, faults.DONE]
    monkeypatch.setenv("VOICE_LLM_URL", lab.serve(fault=faults.stream(*pieces)).url)
    with sse.Answer(HI) as answer:
        reader, read = iter(answer), []
        for _ in range(3):
            before = sse.clock()
            gate.release()
            read.append((before, next(reader)["t_ms"], sse.clock()))
        before = sse.clock()
        gate.release()
        assert next(reader, None) is None
        read.append((before, answer.total_ms, sse.clock()))
    for before, ms, after in read:
        assert ms == round(ms, 3)
        assert before - 1e-6 <= answer.start + ms / 1000 <= after + 1e-6


@pytest.mark.parametrize("fault", [None, "buffered"])
def test_whoever_iterates_can_stop_an_answer_and_no_buffer_counts(lab, monkeypatch, fault):
    fake = lab.serve(token_ms=20, fault=fault)
    monkeypatch.setenv("VOICE_LLM_URL", fake.url)
    texts = []
    with sse.Answer([{"role": "user", "content": COUNTING}]) as answer:
        for chunk in answer:
            texts.append(chunk["text"])
            if len(texts) == 3:
                before = sse.clock()
                answer.close()
                after = sse.clock()
    assert "".join(texts) == "1, 2"
    assert (answer.received, answer.total_ms, answer.finish_reason) == (3, None, None)
    assert before - 1e-6 <= answer.start + answer.closed_at_ms / 1000 <= after + 1e-6
    assert fault or eventually(lambda: len(fake.closed_ms) == 1)


def test_the_readers_that_bench_lag_compares_read_the_same():
    """How fast they are is no test: it depends on the machine, see bench_lag.py."""
    with bench_lag.server() as port:
        read = [bench_lag.read_sse, bench_lag.read_bare_socket]
        ours, bare = ([text for _, text in reader(port, "burst", 20)] for reader in read)
    assert ours == bare == [" patient"] * 20
