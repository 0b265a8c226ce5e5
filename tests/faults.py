"""What servers and proxies do to an event stream, by name; the docstrings are `fake_server.py --faults`.

CHAT answers a chat request, SLOTS answers /slots. Each entry is a function of the connection (`wire`,
see fake_server.py) and of what the right server would have sent: the events of the answer, as they
come, or the list of slots. HARMLESS names the entries of CHAT that a good reader doesn't notice.
"""

import itertools
import json
import pathlib
import time

RECORDED = pathlib.Path(__file__).parent / "recorded" / "llama-server-b11434.txt"

CHAT = {}
SLOTS = {}
HARMLESS = []


def chat(wire, events):
    """What llama-server does."""
    wire.head()
    for event in events:
        wire.event(event)
    wire.done()


def slots(wire, states):
    """What llama-server does."""
    wire.json(states)


def fault(function):
    CHAT[function.__name__] = function
    return function


def harmless(function):
    HARMLESS.append(function.__name__)
    return fault(function)


def slots_fault(function):
    SLOTS[function.__name__] = function
    return function


def content(event):
    """The text of an event, "" where it has none."""
    return ((event.get("choices") or [{}])[0].get("delta") or {}).get("content") or ""


def data(event):
    return b"data: " + json.dumps(event).encode() + b"\n\n"


# ---------------------------------------------------------------------------- right, but unusual


@harmless
def comments(wire, events):
    """comments before, between and after the events, also at once after the headers"""
    wire.head()
    wire.send(b":\n\n: keep-alive\n\n")
    for event in events:
        wire.event(event)
        wire.send(b":\n\n: data: {not an event}\n")
    wire.done()


@harmless
def comments_at_prefill(wire, events):
    """a comment every 100 ms while the prompt is computed, 200 ms longer than it takes"""
    wire.head()
    for _ in range(2):
        wire.send(b":\n\n")
        wire.pause(0.1)
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def crlf(wire, events):
    """lines that end with CR LF"""
    wire.head()
    for event in events:
        wire.send(data(event).replace(b"\n", b"\r\n"))
    wire.send(b"data: [DONE]\r\n\r\n")
    wire.end()


@harmless
def no_space(wire, events):
    """data: without the space"""
    wire.head()
    for event in events:
        wire.send(data(event).replace(b"data: ", b"data:", 1))
    wire.send(b"data:[DONE]\n\n")
    wire.end()


@harmless
def many_data_lines(wire, events):
    """one event over several data lines"""
    wire.head()
    for event in events:
        lines = json.dumps(event, indent=1).split("\n")
        wire.send("".join(f"data: {line}\n" for line in lines).encode() + b"\n")
    wire.done()


@harmless
def other_fields(wire, events):
    """event, id, retry, unknown fields and a line without a colon around the data"""
    wire.head()
    for event in events:
        wire.send(b"id: 1\nevent: message\nretry: 10\nfoo: bar\nfoo\n" + data(event)[:-1] + b"foo: bar\n\nid\n\n")
    wire.done()


@harmless
def empty_data(wire, events):
    """events with empty data, as a keep-alive"""
    wire.head()
    for event in events:
        wire.send(b"data\n\ndata:\n\ndata:  \n\n" + data(event))
    wire.done()


@harmless
def bom(wire, events):
    """a byte order mark at the very start"""
    wire.head()
    wire.send(b"\xef\xbb\xbf" + data(next(events)))
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def bytewise(wire, events):
    """every byte in an HTTP chunk of its own"""
    wire.head()
    for event in events:
        for byte in data(event):
            wire.send(bytes([byte]))
    wire.done()


@harmless
def batched(wire, events):
    """three tokens in one event"""
    wire.head()
    wire.event(next(events))
    batch = ""
    for count, event in enumerate(events, 1):
        if not content(event):
            wire.event({"choices": [{"index": 0, "delta": {"content": batch}}]})
            wire.event(event)
            break
        batch += content(event)
        if count % 3 == 0:
            wire.event({"choices": [{"index": 0, "delta": {"content": batch}}]})
            batch = ""
    wire.done()


@harmless
def two_in_a_chunk(wire, events):
    """two events in one HTTP chunk"""
    wire.head()
    for event in events:
        wire.send(data(event) + b"".join(map(data, itertools.islice(events, 1))))
    wire.done()


@harmless
def early_role(wire, events):
    """the role, with "content": "", 150 ms before the prompt is even begun"""
    wire.head()
    wire.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    wire.pause(0.15)
    next(events)
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def empty_contents(wire, events):
    """content that is null, empty or missing between the tokens, and no choices at all"""
    wire.head()
    for event in events:
        for delta in {"content": None}, {"content": ""}, {}, None:
            wire.event({"choices": [{"index": 0, "delta": delta}]})
        wire.event({"choices": []})
        wire.event({"choices": None, "error": None})
        wire.event(event)
    wire.done()


@harmless
def timings_apart(wire, events):
    """the timings on one more event without choices, with the usage"""
    wire.head()
    for event in events:
        timings = event.pop("timings", None)
        wire.event(event)
    wire.event({"choices": [], "usage": {"total_tokens": 1}, "timings": timings})
    wire.done()


@harmless
def timings_per_token(wire, events):
    """timings on every event: the last ones count"""
    wire.head()
    for count, event in enumerate(events):
        wrong = {"cache_n": 0, "prompt_n": 1, "prompt_ms": 0.0, "predicted_n": count, "predicted_ms": 0.0}
        wire.event({**event, "timings": event.get("timings", wrong)})
    wire.done()


@harmless
def reasoning_first(wire, events):
    """120 ms of reasoning before the answer"""
    wire.head()
    wire.event(next(events))
    for _ in range(3):
        wire.event({"choices": [{"index": 0, "delta": {"reasoning_content": "Hmm. "}}]})
        wire.pause(0.04)
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def no_last_newline(wire, events):
    """[DONE] without a newline, and the connection ends"""
    wire.head(framing="close")
    for event in events:
        wire.event(event)
    wire.send(b"data: [DONE]")


@harmless
def connection_close(wire, events):
    """Connection: close, and no length"""
    wire.head(framing="close")
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def http_1_0(wire, events):
    """HTTP/1.0"""
    wire.head(framing="close", version="HTTP/1.0")
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def late_done(wire, events):
    """[DONE] 100 ms after everything else"""
    wire.head()
    for event in events:
        wire.event(event)
    wire.pause(0.1)
    wire.done()


@harmless
def no_content_type(wire, events):
    """no Content-Type header"""
    wire.head(kind=None)
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def open_after_done(wire, events):
    """the connection stays open and silent after [DONE], without even a blank line"""
    wire.head()
    for event in events:
        wire.event(event)
    wire.send(b"data: [DONE]\n")
    wire.silence()


# ---------------------------------------------------------------------------- right, with a text of its own


def with_text(wire, events, *texts):
    """Send `texts` in place of the answer's tokens."""
    wire.head()
    wire.event(next(events))
    for text in texts:
        wire.event({"choices": [{"index": 0, "delta": {"content": text}}]})
    for event in events:
        if not content(event):
            wire.event(event)
    wire.done()


@fault
def line_separators(wire, events):
    """U+2028, U+0085 and others that are no line end here, raw inside the data"""
    text = "One\u2028two\u0085three\x0cfour\u2029five. End."
    wire.head()
    wire.event(next(events))
    wire.send(
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False).encode() + b"\n\n"
    )
    for event in events:
        if not content(event):
            wire.event(event)
    wire.done()


@fault
def split_characters(wire, events):
    """raw UTF-8, each HTTP chunk one byte long"""
    wire.head()
    wire.event(next(events))
    text = json.dumps({"choices": [{"delta": {"content": "診療は九時から。 🙂 OK."}}]}, ensure_ascii=False)
    for byte in b"data: " + text.encode() + b"\n\n":
        wire.send(bytes([byte]))
    for event in events:
        if not content(event):
            wire.event(event)
    wire.done()


@fault
def long_line(wire, events):
    """one line of 3 MB"""
    with_text(wire, events, "Long. ", "x" * 3_000_000)


@fault
def long_answer(wire, events):
    """thirty fragments of 8 kB, 10 ms apart"""
    wire.head()
    for event in events:
        if not content(event):
            wire.event(event)
        elif not wire.server.fake.sent_ms[-1]:
            for _ in range(30):
                wire.event({"choices": [{"index": 0, "delta": {"content": "x" * 8000}}]})
                wire.pause(0.01)
    wire.done()


@fault
def half_surrogates(wire, events):
    """a character cut in two halves of a surrogate pair, one an event"""
    with_text(wire, events, "Fine \ud83d", "\ude00. Bye.")


@fault
def terminal_codes(wire, events):
    """an answer that clears the screen, sets a title, rings the bell and forges a line"""
    with_text(wire, events, "\x1b[2J\x1b]0;owned\x07", "Hi\r", "there\n\x9b31m\u202ewrote.", " Bye.")


@fault
def recorded(wire, events):
    """the bytes that a real llama-server sent"""
    for _ in events:
        pass
    wire.head()
    for line in RECORDED.read_bytes().splitlines(keepends=True):
        wire.send(line)
        wire.pause(0.0005)
    wire.end()


# ---------------------------------------------------------------------------- refusals


@fault
def loading(wire, events):
    """503 while the model is loading"""
    wire.error(503, "unavailable_error", "Loading model")


@fault
def unauthorized(wire, events):
    """401: an API key is asked for"""
    wire.error(401, "authentication_error", "Invalid API Key\x1b[2J")


@fault
def too_long(wire, events):
    """400: the prompt exceeds the context"""
    wire.error(
        400, "exceed_context_size_error", "request (6016 tokens) exceeds the available context size (4096 tokens)"
    )


@fault
def error_body_silent(wire, events):
    """500, and then its body never comes"""
    wire.send_response(500)
    wire.send_header("Content-Length", "100")
    wire.end_headers()
    wire.silence()


@fault
def proxy_page(wire, events):
    """a proxy's 502 page"""
    wire.head(502, "text/html", "close")
    wire.send(b"<html><head><title>502 Bad\nGateway</title></head><body>\x1b[31mnginx</body></html>")


@fault
def login_page(wire, events):
    """a web page with status 200"""
    wire.head(200, "text/html; charset=utf-8", "close")
    wire.send(b"<html><head><title>Sign in</title></head></html>")


@fault
def redirect(wire, events):
    """302 to somewhere else"""
    wire.send_response(302)
    wire.send_header("Location", "http://127.0.0.1:9/")
    wire.send_header("Content-Length", "0")
    wire.end_headers()


@fault
def not_streaming(wire, events):
    """a whole JSON answer instead of a stream"""
    wire.json({"choices": [{"message": {"role": "assistant", "content": "Hello."}}]})


@fault
def json_error_200(wire, events):
    """an error as JSON, with status 200"""
    wire.json({"error": {"code": 500, "message": "out of memory"}})


@fault
def not_http(wire, events):
    """bytes that are no HTTP"""
    wire.wfile.write(b"\x16\x03\x01 SSH-2.0-nothing\r\n\r\n")
    wire.close_connection = True


@fault
def hung_up(wire, events):
    """the connection ends before any answer"""
    wire.close_connection = True


# ---------------------------------------------------------------------------- cut off, stalled


def some(wire, events, count=5, framing="chunked"):
    """The head of an answer and its first events."""
    wire.head(framing=framing)
    for event in itertools.islice(events, count):
        wire.event(event)


@fault
def cut_between_chunks(wire, events):
    """the connection ends between two HTTP chunks"""
    some(wire, events)
    wire.close_connection = True


@fault
def cut_inside_line(wire, events):
    """the connection ends inside a line"""
    some(wire, events)
    wire.wfile.write(b'ff\r\ndata: {"choices": [{"del')
    wire.close_connection = True


@fault
def cut_close(wire, events):
    """the connection ends inside a line of a body without a length"""
    some(wire, events, framing="close")
    wire.send(b'data: {"choices": [{"del')


@fault
def cut_reset(wire, events):
    """the connection is reset"""
    some(wire, events)
    wire.pause(0.05)
    wire.reset()


@fault
def no_done(wire, events):
    """a clean end, with finish_reason and timings, but no [DONE]"""
    wire.head()
    for event in events:
        wire.event(event)
    wire.end()


@fault
def empty_stream(wire, events):
    """headers, and a clean end"""
    wire.head()
    wire.end()


@fault
def bad_chunk(wire, events):
    """an HTTP chunk whose size is no number"""
    some(wire, events)
    wire.wfile.write(b"zz\r\n\r\n")
    wire.close_connection = True


@fault
def huge_chunk(wire, events):
    """an HTTP chunk whose size is beyond every number of bytes"""
    some(wire, events)
    wire.wfile.write(b"F" * 20 + b"\r\ndata: {}\n\n")
    wire.silence()


@fault
def packed(wire, events):
    """a body that a proxy has packed with gzip"""
    wire.send_response(200)
    wire.send_header("Content-Type", "text/event-stream")
    wire.send_header("Content-Encoding", "gzip")
    wire.send_header("Content-Length", "20")
    wire.end_headers()
    wire.wfile.write(bytes(20))


@fault
def finish_and_silence(wire, events):
    """finish_reason and timings, and then silence"""
    wire.head()
    for event in events:
        wire.event(event)
    wire.silence()


@fault
def short_finish_and_silence(wire, events):
    """three tokens, finish_reason, and then silence"""
    some(wire, events, 4)
    wire.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    wire.silence()


@fault
def short(wire, events):
    """an answer of three tokens"""
    some(wire, events, 4)
    wire.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    wire.done()


@fault
def silence(wire, events):
    """no headers, nothing, for ever"""
    wire.silence()


@fault
def silence_after_headers(wire, events):
    """headers, and then nothing for ever"""
    wire.head()
    wire.silence()


@fault
def only_comments(wire, events):
    """a comment every 20 ms for ever"""
    wire.head()
    while True:
        wire.send(b":\n\n")
        wire.pause(0.02)


@fault
def stall(wire, events):
    """five events, and then silence"""
    some(wire, events)
    wire.silence()


@fault
def stall_close(wire, events):
    """five events with Connection: close, and then silence"""
    some(wire, events, framing="close")
    wire.silence()


@fault
def dribble(wire, events):
    """five events, and then one event byte by byte, every 20 ms, for ever"""
    some(wire, events)
    wire.send(b"data: ")
    while True:
        wire.send(b" ")
        wire.pause(0.02)


@fault
def dribble_headers(wire, events):
    """headers byte by byte, every 20 ms, for ever"""
    wire.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        wire.wfile.write(b"x")
        wire.pause(0.02)


# ---------------------------------------------------------------------------- errors and lies in the stream


def broken(name, piece, doc, count=5, then_done=False):
    """A fault that sends `piece` after `count` events of the answer."""

    def send(wire, events):
        some(wire, events, count)
        wire.send(piece)
        if then_done:
            for event in events:
                wire.event(event)
            wire.done()
        wire.end()

    send.__name__, send.__doc__ = name, doc
    return fault(send)


ERROR = b'{"error": {"code": 500, "message": "the GPU fell off", "type": "server_error"}}'
broken("error_event", b"data: " + ERROR + b"\n\n", "an error as an event, after content")
broken("error_event_first", b"data: " + ERROR + b"\n\n", "an error as an event, before any content", 0)
broken(
    "error_event_and_done",
    b"data: " + ERROR + b"\n\n",
    "an error as an event, and the answer goes on to [DONE]",
    5,
    True,
)
broken("error_text", b'data: {"error": "the GPU fell off"}\n\n', "an error whose value is text", 5, True)
broken(
    "error_object", b'data: {"object": "error", "message": "the GPU fell off"}\n\n', "an object of type error", 5, True
)
broken("error_field", b"error: " + ERROR + b"\n\n", "a bare error: line", 5, True)
broken("error_field_first", b"error: " + ERROR + b"\n\n", "a bare error: line before any content", 0)
broken("error_json", ERROR + b"\n", "bare JSON in the stream", 5, True)
broken("error_finish", b'data: {"choices": [{"finish_reason": "error"}]}\n\n', "finish_reason error", 5, True)
broken("null_event", b"data: null\n\n", "an event that is null", 5, True)
broken("error_named", b"event: error\ndata: the GPU fell off\n\n", "an event of type error", 5, True)
broken("not_json", b"data: {oops\n\n", "an event that is not JSON", 5, True)
broken("not_an_object", b"data: [1, 2]\n\n", "an event that is JSON, but no object", 5, True)
broken("deep_json", b"data: " + b"[" * 100_000 + b"\n\n", "JSON nested 100,000 deep", 5, True)
broken("content_a_number", b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "content that is a number", 5, True)
broken("choices_a_text", b'data: {"choices": "none"}\n\n', "choices that are a text", 5, True)
broken("joined_events", b"data: {}\ndata: [DONE]\n\n", "[DONE] in one event with something else")


def with_timings(name, change, doc):
    """A fault whose timings are what `change` makes of the right ones."""

    def send(wire, events):
        wire.head()
        for event in events:
            if "timings" in event:
                event["timings"] = change(event["timings"])
            wire.event(event)
        wire.done()

    send.__name__, send.__doc__ = name, doc
    return fault(send)


with_timings("timings_null", lambda timings: None, "timings that are null")
with_timings("timings_text", lambda timings: "fast", "timings that are a text")
with_timings("timings_empty", lambda timings: {}, "timings without a key")
with_timings("timings_nan", lambda timings: dict.fromkeys(timings, float("nan")), "timings that are not a number")
with_timings("timings_true", lambda timings: dict.fromkeys(timings, True), "timings that are true")
with_timings("timings_words", lambda timings: dict.fromkeys(timings, "12"), "timings that are texts")
with_timings("timings_negative", lambda timings: dict.fromkeys(timings, -1), "timings below zero")
with_timings("timings_fraction", lambda timings: dict.fromkeys(timings, 12.5), "counts that are not whole")
with_timings("cached_untold", lambda t: {key: t[key] for key in t if key != "cache_n"}, "timings without cache_n")
with_timings("timings_huge", lambda timings: dict.fromkeys(timings, 10**400), "timings beyond every number")
with_timings("all_cached", lambda t: {**t, "cache_n": t["prompt_n"] // 4}, "a fifth of every prompt out of a cache")


@fault
def no_timings(wire, events):
    """no timings at all"""
    wire.head()
    for event in events:
        event.pop("timings", None)
        wire.event(event)
    wire.done()


@fault
def no_content(wire, events):
    """an answer without content"""
    wire.head()
    for event in events:
        if not content(event):
            wire.event(event)
    wire.done()


@fault
def only_reasoning(wire, events):
    """an answer of nothing but reasoning"""
    wire.head()
    for event in events:
        if content(event):
            event["choices"][0]["delta"] = {"reasoning_content": content(event)}
        wire.event(event)
    wire.done()


@fault
def runaway_line(wire, events):
    """a line without an end"""
    wire.head(framing="close")
    while True:
        wire.send(b"x" * 2**20)
        wire.pause(0)


# ---------------------------------------------------------------------------- /slots


@slots_fault
def slots_off(wire, states):
    """501, as with --no-slots"""
    wire.error(501, "not_supported_error", "This server does not support slots endpoint. Start it with `--slots`")


@slots_fault
def slots_missing(wire, states):
    """404, as from another kind of server"""
    wire.error(404, "not_found_error", "File Not Found")


@slots_fault
def slots_page(wire, states):
    """a web page"""
    wire.json(b"<html>")


@slots_fault
def slots_shape(wire, states):
    """JSON of another shape"""
    wire.json({"slots": states})


@slots_fault
def slots_texts(wire, states):
    """is_processing as a text"""
    wire.json([dict(state, is_processing="false") for state in states])


@slots_fault
def slots_busy(wire, states):
    """a slot that never becomes idle"""
    wire.json([dict(state, is_processing=True) for state in states])


@slots_fault
def slots_silence(wire, states):
    """no answer"""
    time.sleep(30)
