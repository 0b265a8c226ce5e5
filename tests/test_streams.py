"""What a good reader doesn't notice: streams that are right, but not the usual ones."""

import json
import sys

import bench_lag
import faults
import pytest
from conftest import at_once, eventually
from fake_server import ANSWERS, tokenize

import sse

NOT_BEFORE_MS = {"comments_at_prefill": 200, "early_role": 150, "reasoning_first": 120}
BRING = ANSWERS["What should a new patient bring?"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    def run(lab, fault, script):
        lab.serve(fault=fault)
        return lab, lab.run(script)

    rows = [(fault, script) for fault in faults.HARMLESS for script in ("measure_ttft.py", "sse.py")]
    return at_once(tmp_path_factory.mktemp("rows"), rows, run)


@pytest.mark.parametrize("fault", faults.HARMLESS)
def test_it_is_read_right(outcomes, fault):
    lab, process = outcomes[fault, "measure_ttft.py"]
    assert process.returncode == 0, process.err
    for run in lab.read("ttft.json")["runs"]:
        assert NOT_BEFORE_MS.get(fault, 0) <= run["ttft_ms"] < run["total_ms"]
        assert run["tokens"] == len(tokenize(BRING)) + 1
        assert run["total_ms"] >= run["ttft_ms"] + (100 if fault == "late_done" else 0)
    lab, process = outcomes[fault, "sse.py"]
    assert process.returncode == 0, process.err
    chunks = [json.loads(line) for line in (lab.out / "chunks.jsonl").read_text("utf-8").splitlines()]
    assert "".join(chunk["text"] for chunk in chunks) == BRING


def test_the_raw_file_has_the_comments_and_the_blank_lines_too(outcomes):
    lab, _ = outcomes["comments", "sse.py"]
    raw = (lab.out / "sse_raw.txt").read_bytes()
    assert raw.startswith(b":\n\n: keep-alive\n\ndata: {")
    assert raw.count(b": data: {not an event}\n") == raw.count(b"data: {") // 2


def test_a_connection_that_stays_open_after_done_is_not_waited_for(lab):
    lab.serve(fault="open_after_done")
    assert lab.good("measure_sentence.py").seconds < 3


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("line_separators", "One\u2028two\u0085three\x0cfour\u2029five. End."),
        ("split_characters", "診療は九時から。 🙂 OK."),
        ("long_line", "Long. " + "x" * 3_000_000),
        ("half_surrogates", "Fine 😀. Bye."),
    ],
    ids=lambda value: value[:16],
)
def test_a_text_of_unusual_characters_or_length_arrives_whole(lab, fault, text):
    lab.serve(fault=fault)
    lab.good("measure_sentence.py")
    assert lab.read("sentence.json")["text"].encode("utf-16", "surrogatepass").decode("utf-16") == text


def test_what_a_model_says_can_not_steer_the_terminal(lab):
    lab.serve(fault="terminal_codes")
    for script in "sse.py", "measure_sentence.py":
        process = lab.good(script)
        assert "\\x1b[2J" in process.out
        assert all(c.isprintable() or c == "\n" for c in process.out + process.err)
        assert "\\nthere" in process.out or "there\\n" in process.out


def test_the_answer_is_shown_on_a_terminal_that_knows_ascii_only(lab):
    lab.serve(fault="split_characters")
    lab.env["PYTHONIOENCODING"] = "ascii"
    assert "\\u8a3a" in lab.good("sse.py").out


def events(data):
    lines = data.splitlines(keepends=True) if isinstance(data, bytes) else data
    return [(kind, value) for _, kind, value in sse.events((0, line) for line in lines)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\r\n\r\n", [b"a"]),
        (b":c\ndata: a\n: c\n\n:\n\n", [b"a"]),
        (b"id: 1\nretry: 5\nfoo\nfoo: x\ndata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
        (b"data\n\ndata:\n\n", []),
        (b"data: a\n\ndata: b\n", [b"a"]),
        (b"data: [DONE]", [b"[DONE]"]),
    ],
)
def test_events_follow_the_standard(stream, expected):
    assert events(stream) == [(b"message", value) for value in expected]


def test_an_event_has_the_time_of_its_last_data_line():
    lines = [(1, b"data: a\n"), (2, b"data: b\n"), (3, b": c\n"), (4, b"\n")]
    assert list(sse.events(lines)) == [(2, b"message", b"a\nb")]


def test_stream_writes_every_line_to_a_path_or_to_a_binary_file(lab, tmp_path, monkeypatch):
    fake = lab.serve(fault="recorded")
    monkeypatch.setenv("VOICE_LLM_URL", fake.url)
    messages = [{"role": "user", "content": "hi"}]
    chunks, total_ms, timings = sse.stream(messages, raw_out=str(tmp_path / "raw.txt"))
    with open(tmp_path / "raw2.txt", "wb") as file:
        sse.stream(messages, raw_out=file)
    assert (tmp_path / "raw.txt").read_bytes() == (tmp_path / "raw2.txt").read_bytes() == faults.RECORDED.read_bytes()
    assert 0 < chunks[0]["t_ms"] <= chunks[-1]["t_ms"] < total_ms
    assert timings["prompt_n"] == 34


def test_an_answer_can_be_stopped_by_whoever_iterates_over_it(lab, monkeypatch):
    fake = lab.serve(token_ms=10)
    monkeypatch.setenv("VOICE_LLM_URL", fake.url)
    texts = []
    with sse.Answer([{"role": "user", "content": "List the numbers from 1 to 300, separated by commas."}]) as answer:
        for chunk in answer:
            texts.append(chunk["text"])
            if len(texts) == 3:
                answer.close()
    assert "".join(texts) == "1, 2"
    assert answer.total_ms is None
    assert not answer.ended
    assert eventually(lambda: len(fake.closed_ms) == 1)


def costs(*runs, rounds):
    """The least processor time a fragment of each of `runs`, (reader, count), of several rounds in turn."""
    with bench_lag.server() as port:
        return [
            min(times) for times in zip(*([bench_lag.cpu_us(read, port, n) for read, n in runs] for _ in range(rounds)))
        ]


def test_a_long_stream_costs_no_more_a_fragment_than_a_short_one():
    short, long = costs((bench_lag.read_sse, 5000), (bench_lag.read_sse, 100_000), rounds=2)
    assert long < 1.5 * short


def test_a_fragment_costs_less_than_two_and_a_half_times_a_bare_socket_loop():
    bare, ours = costs((bench_lag.read_bare_socket, 5000), (bench_lag.read_sse, 5000), rounds=12)
    # In Python 3.9 http.client copies what it reads once more.
    assert ours < (2.5 if sys.version_info >= (3, 10) else 3.2) * bare
