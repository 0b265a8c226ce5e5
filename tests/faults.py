"""What servers and proxies do to an event stream, by name; the docstrings are `fake_server.py --faults`.

CHAT answers a chat request, SLOTS answers /slots. Each entry is a function of the connection (`wire`,
see fake_server.py) and of what the right server would have sent: the events of the answer, as they
come, or the list of slots. HARMLESS names the entries of CHAT that a good reader doesn't notice.

To add a fault: write its function here, under @fault (or @harmless, or @slots_fault), with a docstring that
says what it does. Then give it a row in test_faults.py: ROWS where it must fail, NOTES where it must be noted;
@harmless ones are run by test_streams.py. A fault that no test names fails test_every_fault_has_a_test.
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
def figures_alone(wire, events):
    """two more events before the end, one with the usage alone and one with the timings alone"""
    wire.head()
    for event in events:
        wire.event(event)
        timings = event.get("timings")
    wire.event({"usage": {"total_tokens": 1}})
    wire.event({"timings": timings})
    wire.done()


@harmless
def comments(wire, events):
    """comments before, between and after the events, also at once after the headers"""
    wire.head()
    wire.send(b":\n\n: keep-alive\n\n")
    for event in events:
        wire.event(event)
        wire.send(b":\n\n: data: {not an event}\n")
    wire.done()


@fault
def queued(wire, events):
    """200 ms with comments before the prompt is even begun, as in a queue"""
    wire.head()
    for _ in range(2):
        wire.send(b":\n\n")
        wire.pause(0.1)
    for event in events:
        wire.event(event)
    wire.done()


@harmless
def bytewise(wire, events):
    """every byte of the first ten events in an HTTP chunk of its own: of all would be slow, and earn a note"""
    wire.head()
    for event in itertools.islice(events, 10):
        for byte in data(event):
            wire.send(bytes([byte]))
    for event in events:
        wire.send(data(event))
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


@fault
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
        wrong = {
            "cache_n": 0,
            "prompt_n": 1,
            "prompt_ms": 0.0,
            "predicted_n": count,
            "predicted_ms": 0.0,
        }
        wire.event({**event, "timings": event.get("timings", wrong)})
    wire.done()


@fault
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
    """Connection: close, no length, and Content-Encoding: Identity"""
    wire.send_response(200)
    wire.send_header("Content-Type", "text/event-stream")
    wire.send_header("Content-Encoding", "Identity")
    wire.send_header("Connection", "close")
    wire.end_headers()
    wire.framing = "close"
    wire.close_connection = True
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


@harmless
def timings_only(wire, events):
    """no finish_reason, but llama-server's final timings"""
    wire.head()
    for event in events:
        event["choices"][0]["finish_reason"] = None
        wire.event(event)
    wire.done()


@harmless
def finish_with_content(wire, events):
    """the finish_reason on the last event with content, and no event after it but one with the timings"""
    wire.head()
    held = next(events)
    for event in events:
        if not content(event):
            held["choices"][0]["finish_reason"] = event["choices"][0]["finish_reason"]
        wire.event(held)
        held = event
    wire.event({"choices": [], "timings": held["timings"]})
    wire.done()


# ---------------------------------------------------------------------------- true, with something else in it


@fault
def buffered(wire, events):
    """a proxy that holds everything back until the end"""
    wire.head()
    for event in list(events):
        wire.event(event)
    wire.done()


@fault
def buffered_untold(wire, events):
    """a proxy that holds everything back, here nine fragments, and a server without timings"""
    wire.head()
    held = [
        *itertools.islice(events, 10),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    wire.send(b"".join(map(data, held)))
    wire.done()


def slowly(wire, events, before=0.0, after=0.0):
    """The events, with a pause before the prompt, one of 300 ms behind the first token, and one before [DONE]."""
    wire.head()
    wire.pause(before)
    tokens = 0
    for event in events:
        wire.event(event)
        tokens += bool(content(event))
        if tokens == 1 and content(event):
            wire.pause(0.3)
    wire.pause(after)
    wire.done()


@fault
def slow_second(wire, events):
    """the second token 300 ms after the first"""
    slowly(wire, events)


@fault
def paced(wire, events):
    """as slow_second; first tokens after 40, 10, 30, 20 and 50 ms more, ends after 40, 100, 20, 80 and 60 ms more"""
    number = (len(wire.server.fake.requests) - 1) % 5
    slowly(wire, events, (40, 10, 30, 20, 50)[number] / 1000, (40, 100, 20, 80, 60)[number] / 1000)


@harmless
def named_pings(wire, events):
    """events of another type in between, with JSON, with text"""
    wire.head()
    for event in events:
        wire.send(b'event: ping\ndata: {"type": "ping"}\n\nevent: keepalive\ndata: ping\n\n')
        wire.event(event)
    wire.done()


@fault
def recomputes(wire, events):
    """a model with recurrent memory, or --no-cache-prompt: every prompt is computed whole"""
    wire.request_body["cache_prompt"] = False
    chat(wire, events)


@fault
def deaf(wire, events):
    """a relay that swallows the hang-up: the server goes on to the end"""
    wire.head()
    wire.left, wire.cancel = lambda seconds: time.sleep(max(0, seconds)), lambda: None
    for event in events:
        wire.event(event)
    wire.done()


# ---------------------------------------------------------------------------- what was asked for is not what is done


@fault
def cache_always(wire, events):
    """a proxy that drops cache_prompt, so that the cache stays on"""
    wire.request_body.pop("cache_prompt")
    chat(wire, events)


@fault
def cache_always_untold(wire, events):
    """the cache stays on, and the timings have no cache_n"""
    wire.request_body.pop("cache_prompt")
    wire.head()
    for event in events:
        event.get("timings", {}).pop("cache_n", None)
        wire.event(event)
    wire.done()


@fault
def cache_partly_untold(wire, events):
    """a third of the prompt comes from a cache after the first request, and the timings have no cache_n"""
    wire.head()
    for event in events:
        if "timings" in event:
            del event["timings"]["cache_n"]
            if len(wire.server.fake.requests) > 1:
                event["timings"]["prompt_n"] = event["timings"]["prompt_n"] * 2 // 3
        wire.event(event)
    wire.done()


@fault
def late_headers(wire, events):
    """the headers after 700 ms"""
    wire.pause(0.7)
    chat(wire, events)


@fault
def late_refusal(wire, events):
    """503 after 700 ms"""
    wire.pause(0.7)
    wire.error(503, "unavailable_error", "too many requests")


@fault
def late_content(wire, events):
    """headers and the role at once, but content only after 900 ms"""
    wire.head()
    wire.event(next(events))
    wire.pause(0.9)
    for event in events:
        wire.event(event)
    wire.done()


@fault
def long_reasoning(wire, events):
    """900 ms of reasoning before the answer"""
    wire.head()
    wire.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
    for _ in range(18):
        wire.event({"choices": [{"index": 0, "delta": {"reasoning_content": "Hmm. "}}]})
        wire.pause(0.05)
    for event in events:
        wire.event(event)
    wire.done()


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
        b"data: "
        + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False).encode()
        + b"\n\n"
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
    text = json.dumps(
        {"choices": [{"delta": {"content": "診療は九時から。 🙂 OK."}}]}, ensure_ascii=False
    )
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
    with_text(
        wire, events, "\x1b[2J\x1b]0;owned\x07", "Hi\r", "there\n\x9b31m\u202ewrote.", " Bye."
    )


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
        400,
        "exceed_context_size_error",
        "request (6016 tokens) exceeds the available context size (4096 tokens)",
    )


@fault
def error_body_silent(wire, events):
    """500, and then its body never comes"""
    wire.send_response(500)
    wire.send_header("Content-Length", "100")
    wire.end_headers()
    wire.silence()


@fault
def context_exceeded(wire, events):
    """500: the context of a build that says so in other words"""
    wire.error(500, "server_error", "Context size has been exceeded.")


@fault
def embeddings(wire, events):
    """501 of a llama-server that was started for embeddings"""
    what = "This server does not support completions. Start it without `--embeddings`"
    wire.error(501, "not_supported_error", what)


@fault
def router(wire, events):
    """400 of a llama-server that was started without a model"""
    wire.error(400, "invalid_request_error", "model name is missing from the request")


@fault
def bad_request(wire, events):
    """400 with a cause that is not known here"""
    wire.error(400, "invalid_request_error", "Assistant message must contain content")


def page(name, status, title):
    """A fault: a web page of something that is not llama-server."""

    def send(wire, events):
        wire.head(status, "text/html", "close")
        wire.send(f"<html><head><title>{title}</title></head></html>".encode())

    send.__name__, send.__doc__ = name, f"{status} with a web page"
    return fault(send)


page("login_401", 401, "Please log in")
page("proxy_503", 503, "Service Unavailable")
page("too_large", 413, "Request Entity Too Large")
page("rate_limited", 429, "Too Many Requests")


@fault
def proxy_page(wire, events):
    """a proxy's 502 page"""
    wire.head(502, "text/html", "close")
    wire.send(
        b"<html><head><title>502 Bad\nGateway</title></head><body>\x1b[31mnginx</body></html>"
    )


@fault
def login_page(wire, events):
    """a web page with status 200"""
    wire.head(200, "text/html; charset=utf-8", "close")
    wire.send(b"<html><head><title>Sign in</title></head></html>")


@fault
def redirect(wire, events):
    """301 to somewhere else"""
    wire.send_response(301)
    wire.send_header("Location", "http://127.0.0.1:9/")
    wire.send_header("Content-Length", "0")
    wire.end_headers()


@fault
def text_plain(wire, events):
    """an event stream that never ends, labelled text/plain"""
    wire.head(kind="text/plain")
    for event in events:
        wire.event(event)
    while True:
        wire.send(b":\n\n")
        wire.pause(0.05)


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
def compressed(wire, events):
    """a body that a proxy has compressed with gzip"""
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


@fault
def polite_cut(wire, events):
    """[DONE] after five events, without a finish_reason"""
    some(wire, events)
    wire.done()


@fault
def polite_cut_timings(wire, events):
    """[DONE] after five events, each with timings, and without a finish_reason"""
    wire.head()
    for event in itertools.islice(events, 5):
        wire.event(
            {**event, "timings": {"cache_n": 0, "prompt_n": 40, "prompt_ms": 1.0, "predicted_n": 4}}
        )
    wire.done()


@fault
def finish_filter(wire, events):
    """finish_reason content_filter, and [DONE]"""
    some(wire, events)
    wire.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]})
    wire.done()


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
broken(
    "error_event_first", b"data: " + ERROR + b"\n\n", "an error as an event, before any content", 0
)
broken(
    "error_event_and_done",
    b"data: " + ERROR + b"\n\n",
    "an error as an event, and the answer goes on to [DONE]",
    5,
    True,
)
broken(
    "error_text",
    b'data: {"error": "the GPU fell off"}\n\n',
    "an error whose value is text",
    5,
    True,
)
broken(
    "error_object",
    b'data: {"object": "error", "message": "the GPU fell off"}\n\n',
    "an object of type error",
    5,
    True,
)
broken(
    "error_beside_choices",
    b'data: {"choices": [{"delta": {}}], "error": {"message": "the GPU fell off"}}\n\n',
    "an error in a chunk that is right otherwise, as OpenRouter's",
    5,
    True,
)
broken("error_field", b"error: " + ERROR + b"\n\n", "a bare error: line", 5, True)
broken(
    "error_field_first", b"error: " + ERROR + b"\n\n", "a bare error: line before any content", 0
)
broken("error_json", ERROR + b"\n", "bare JSON in the stream", 5, True)
broken(
    "error_finish",
    b'data: {"choices": [{"finish_reason": "error"}]}\n\n',
    "finish_reason error",
    5,
    True,
)
broken(
    "error_code",
    b'data: {"text": "the GPU fell off", "error_code": 50002}\n\n',
    "FastChat's error, and [DONE]",
    5,
    True,
)
broken(
    "error_detail",
    b'data: {"detail": "the GPU fell off"}\n\n',
    "FastAPI's error, and [DONE]",
    5,
    True,
)
broken(
    "error_context",
    b'data: {"error": {"message": "Context size has been exceeded."}}\n\n',
    "a full context",
    5,
)
broken("null_event", b"data: null\n\n", "an event that is null", 5, True)
broken(
    "error_named", b"event: error\ndata: the GPU fell off\n\n", "an event of type error", 5, True
)
broken("not_json", b"data: {oops\n\n", "an event that is not JSON", 5, True)
broken("not_an_object", b"data: [1, 2]\n\n", "an event that is JSON, but no object", 5, True)
broken("deep_json", b"data: " + b"[" * 100_000 + b"\n\n", "JSON nested 100,000 deep", 5, True)
broken(
    "content_a_number",
    b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
    "content that is a number",
    5,
    True,
)
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
with_timings(
    "timings_nan",
    lambda timings: dict.fromkeys(timings, float("nan")),
    "timings that are not a number",
)
with_timings("timings_true", lambda timings: dict.fromkeys(timings, True), "timings that are true")
with_timings(
    "timings_words", lambda timings: dict.fromkeys(timings, "12"), "timings that are texts"
)
with_timings("timings_negative", lambda timings: dict.fromkeys(timings, -1), "timings below zero")
with_timings(
    "timings_fraction",
    lambda t: {**t, "prompt_n": 12.5, "predicted_n": 12.5},
    "counts that are not whole",
)
with_timings(
    "cached_untold",
    lambda t: {key: t[key] for key in t if key != "cache_n"},
    "timings without cache_n",
)
with_timings(
    "everything_kept_untold",
    lambda t: {
        "prompt_n": 1,
        "prompt_ms": t["prompt_ms"],
        "predicted_n": 1,
        "predicted_ms": t["predicted_ms"],
    },
    "one token computed of every prompt, and no cache_n",
)
with_timings(
    "timings_early",
    lambda t: {**t, "prompt_ms": 90_000.0},
    "a prompt that took longer than the answer",
)
with_timings(
    "slow_line",
    lambda t: {**t, "predicted_ms": 1.0},
    "an answer that takes longer than the server took",
)
with_timings(
    "timings_huge", lambda timings: dict.fromkeys(timings, 10**400), "timings beyond every number"
)
with_timings(
    "all_cached",
    lambda t: {**t, "cache_n": t["prompt_n"] // 4},
    "a fifth of every prompt out of a cache",
)


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
    wire.error(
        501,
        "not_supported_error",
        "This server does not support slots endpoint. Start it with `--slots`",
    )


@slots_fault
def slots_deep(wire, states):
    """JSON that no reader can take apart"""
    wire.json(b"[" * 100_000)


@slots_fault
def slots_missing(wire, states):
    """404, as from another kind of server"""
    wire.error(404, "not_found_error", "File Not Found")


@slots_fault
def slots_401(wire, states):
    """401: an API key is asked for"""
    wire.error(401, "authentication_error", "Invalid API Key")


@slots_fault
def slots_502(wire, states):
    """502 from a proxy"""
    wire.json(b"<html><title>502 Bad Gateway</title></html>", 502)


@slots_fault
def slots_loading(wire, states):
    """503 while the model is loading"""
    wire.error(503, "unavailable_error", "Loading model")


@slots_fault
def slots_router(wire, states):
    """400 of a llama-server that was started without a model"""
    wire.error(400, "invalid_request_error", "model name is missing from the request")


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


@slots_fault
def slots_cached(wire, states):
    """a proxy that caches: always idle"""
    wire.json([dict(state, is_processing=False) for state in states])


@slots_fault
def slots_without_id(wire, states):
    """no id_task, as in old builds"""
    wire.json([{key: state[key] for key in state if key != "id_task"} for state in states])


def taken(wire, states):
    """The slots once a client has hung up: with someone else's request at work, which took the slot at once."""
    if wire.server.fake.closed_ms and not states[0]["is_processing"]:
        return [dict(states[0], is_processing=True, id_task=states[0]["id_task"] + 1)]
    return states


@slots_fault
def slots_taken(wire, states):
    """someone else's request takes the slot as soon as a client has hung up, and keeps it"""
    wire.json(taken(wire, states))


@slots_fault
def slots_taken_without_id(wire, states):
    """someone else's request takes the slot, and there is no id_task"""
    slots_without_id(wire, taken(wire, states))


def second_slot(wire, states, busy):
    wire.json([*states, dict(states[0], id=1, is_processing=busy)])


@slots_fault
def slots_second_busy(wire, states):
    """a second slot that is busy while an answer ends and a little longer"""
    second_slot(wire, states, wire.server.fake.paths[-3:-1].count("/v1/chat/completions") > 0)


@slots_fault
def slots_second_ends(wire, states):
    """a second slot that is busy at the first look after an answer, and not at the next"""
    second_slot(wire, states, wire.server.fake.paths[-2:-1] == ["/v1/chat/completions"])


@slots_fault
def slots_two_at_work(wire, states):
    """a second slot that works whenever the first does"""
    second_slot(wire, [dict(states[0], id_task=7)], states[0]["is_processing"])


@slots_fault
def slots_slow(wire, states):
    """an answer that takes 300 ms once a client has hung up"""
    time.sleep(0.3 * bool(wire.server.fake.closed_ms))
    wire.json(states)


@slots_fault
def slots_slow_at_work(wire, states):
    """an answer that takes 700 ms while a slot is at work"""
    time.sleep(0.7 * states[0]["is_processing"])
    wire.json(states)
