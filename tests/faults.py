"""What servers and proxies do wrong, by name: one row each, with what the scripts must do about it.

    chat("proxy_page", "a proxy's 502 page", page(502, "Bad Gateway"), fails("502", "proxy"))

Where it strikes: `chat` (a chat request), `slots`, `health` (that path) or `get` (every GET). Then
its name; what it does, for `fake_server.py --faults`; what is sent; and what a script must do about
it, one or more of fails, for_ever, void, noted, HARMLESS, hung_up, tested_in. test_faults.py runs
each (`pytest -k proxy_page`). To add a fault, add a row: there is no other place.

What is sent is a function of the connection (`wire`, see fake_server.py) and of what the right
server would send: the events of the answer, as they come, or the list of slots. stream(…) and
raw(…) make one of pieces, sent in turn: bytes as they are, a dict as an event, a text as a token,
and such functions themselves: FIVE (the next five events of the right answer), REST,
pause(0.1), SILENCE, DONE …
"""

import functools
import itertools
import json
import pathlib
import time
from typing import NamedTuple

RECORDED = pathlib.Path(__file__).parent / "recorded" / "llama-server-b11434.txt"
STEP_1, STEP_2, TTFT = "sse.py --server", "sse.py", "measure_ttft.py"
PREFILL, CACHE, SENTENCE = "measure_prefill.py", "measure_cache.py", "measure_sentence.py"
CANCEL, EARLY = "measure_cancel.py", "measure_cancel.py --during-prefill"
ALL = (STEP_2, TTFT, PREFILL, CACHE, SENTENCE, CANCEL)
LIMIT = 3  # seconds of VOICE_LLM_TIMEOUT for what only a timeout ends: only such a fault reaches it
CHAT = "/v1/chat/completions"

# ------------------------------------------------------------ the table's columns


class Expected(NamedTuple):
    """What scripts must do about a fault. `cut`: after how many seconds step 7 hangs up."""

    outcome: str
    scripts: tuple
    words: tuple = ()
    limit: float = 0
    cut: float = 60


class Fault(NamedTuple):
    path: str
    what: str
    send: object
    expected: tuple


FAULTS = {}


def add(path, name, what, send, *expected):
    assert expected, f"{name}: what is expected of a script?"
    assert name not in FAULTS, f"{name}: there is one already"
    FAULTS[name] = Fault(path, what, send, expected)


chat, slots = functools.partial(add, CHAT), functools.partial(add, "/slots")
health, get = functools.partial(add, "/health"), functools.partial(add, "every GET")


def of(fault, path, right=None):
    """What `fault` (a name, None, or what a chat is sent) sends for `path`; else `right`."""
    if fault is None:
        return right
    found = Fault(CHAT, "", fault, ()) if callable(fault) else FAULTS[fault]
    strikes = found.path == path or (found.path == "every GET" and path != CHAT)
    return found.send if strikes else right


def scripts(by):
    return (by,) if isinstance(by, str) else tuple(by)


def fails(*words, by=TTFT, limit=0):
    """Status 1, one line with `words`, all files as they were. limit: VOICE_LLM_TIMEOUT."""
    return Expected("fails", scripts(by), words, limit)


def for_ever(*words, by=TTFT):
    """It fails, but only VOICE_LLM_TIMEOUT ends it."""
    return fails(*words, "VOICE_LLM_TIMEOUT", by=by, limit=LIMIT)


def void(*words, by=CANCEL):
    """It fails since the hang-up of step 7 did not meet what it should."""
    return Expected("fails", scripts(by), (*words, "void"), cut=2)


def noted(*words, by=SENTENCE, limit=0):
    """The file is written, and a note has `words`. limit: VOICE_LLM_TIMEOUT."""
    return Expected("noted", scripts(by), words, limit, cut=2)


HARMLESS = Expected("harmless", (SENTENCE,))  # the whole answer is written, and nothing is noted


def hung_up(received):
    """Step 7 hangs up on it after as many fragments."""
    return Expected("hung up", (CANCEL,), (received,), cut=2)


def tested_in(*files):
    """Nothing that fits a row: a test in each of `files` uses it by its name."""
    return Expected("tested in", files)


# ------------------------------------------------------------ what is sent


def send(wire, events, piece):
    if callable(piece):
        piece(wire, events)
    elif isinstance(piece, bytes):
        wire.send(piece)
    else:
        wire.event(delta(content=piece) if isinstance(piece, str) else piece)


def stream(*pieces, **head):
    """The headers of the right answer, or with `head` (see Wire.head), and `pieces`."""

    def answer(wire, events):
        wire.head(**head)
        for piece in pieces:
            send(wire, events, piece)

    return answer


def raw(*pieces):
    """`pieces` without headers; then the connection ends."""

    def answer(wire, events):
        wire.framing, wire.close_connection = "raw", True
        for piece in pieces:
            send(wire, events, piece)

    return answer


def refuse(status, message):
    """llama-server's error."""
    kinds = {400: "invalid_request", 401: "authentication", 404: "not_found", 501: "not_supported"}
    kind = f"{kinds.get(status, 'unavailable' if status == 503 else 'server')}_error"
    return lambda wire, _: wire.error(status, kind, message)


def reply(body, status=200):
    """`body` as JSON, or bytes as they are."""
    return lambda wire, _: wire.json(body, status)


def page(status, title):
    """The web page of something that is not llama-server."""
    html = f"<html><head><title>{title}</title></head><body>\x1b[31mnginx</body></html>"
    return stream(html.encode(), status=status, kind="text/html; charset=utf-8", framing="close")


def states(change):
    """The states of the slots, each as `change` makes it."""
    return lambda wire, slots: wire.json([change(state) for state in slots])


# Pieces: (wire, events).


def first(count, change=lambda event: [event]):
    """The next events of the right answer, or what `change` makes of each; the role is first."""
    return through(lambda events: (p for e in itertools.islice(events, count) for p in change(e)))


def DONE(wire, events):
    wire.done()


def END(wire, events):
    """A clean end, without [DONE]."""
    wire.end()


def HANG_UP(wire, events):
    wire.close_connection = True


def SILENCE(wire, events):
    """Nothing more, until the client leaves. Who asks for one token is hung up on."""
    if wire.command == "POST" and wire.request_body.get("max_tokens") == 1:
        wire.close_connection = True
    else:
        wire.silence()


def RESET(wire, events):
    wire.reset()


def pause(seconds):
    return lambda wire, events: wire.pause(seconds)


def forever(piece, seconds=0.02):
    """`piece` again and again, until the client leaves."""

    def repeat(wire, events):
        while wire.command == "GET" or wire.request_body.get("max_tokens") != 1:
            send(wire, events, piece)
            wire.pause(seconds)
        wire.close_connection = True

    return repeat


def unframed(data):
    """Bytes that are no HTTP chunk, in an answer of chunks."""
    return lambda wire, events: wire.wfile.write(data)


def through(change):
    """The pieces that `change` makes of the events, one after another."""

    def pieces(wire, events):
        for piece in change(events):
            send(wire, events, piece)

    return pieces


def each(change):
    """For each event the pieces that `change` makes of it."""
    return first(None, change)


def last(change):
    """Every event; for the last, which has the timings, the pieces that `change` makes of it."""
    return each(lambda event: change(event) if "timings" in event else [event])


def answering(*pieces):
    """The right answer, with `pieces` in place of its fragments."""

    def change(event):
        role = "role" in event["choices"][0]["delta"]
        return [] if content(event) else [event, *pieces] if role else [event]

    return stream(each(change), DONE)


def amid(piece):
    """The right answer, with `piece` behind five events."""
    return stream(FIVE, piece, REST, DONE)


def with_timings(change):
    """The right answer, with the timings that `change` makes of its own."""
    return stream(last(lambda event: [dict(event, timings=change(event["timings"]))]), DONE)


FIVE, REST = first(5), first(None)
NO_TOKENS_UNTOLD = each(lambda event: [] if content(event) else [without("timings", event)])
NO_TOKENS = each(lambda event: [] if content(event) else [event])
right = stream(REST, DONE)  # what llama-server does


def asked_for(send=right, **changed):
    """The answer to a request that a proxy has changed."""

    def answer(wire, events):
        wire.request_body.update(changed)
        send(wire, events)

    return answer


def content(event):
    """The text of an event, "" where it has none."""
    return ((event.get("choices") or [{}])[0].get("delta") or {}).get("content") or ""


def data(event, ascii=True):
    return b"data: " + json.dumps(event, ensure_ascii=ascii).encode() + b"\n\n"


def bytewise(text):
    return [bytes([byte]) for byte in text]


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


def finish(reason):
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def without(key, values):
    return {name: values[name] for name in values if name != key}


# ------------------------------------------------------------ what needs more than a row


def batched(events):
    yield next(events)
    batch = []
    for event in events:
        batch.append(content(event))
        if not content(event) or len(batch) == 3:
            yield "".join(batch)
            batch = []
        if not content(event):
            yield event


def recorded(events):
    for _ in events:
        pass
    for line in RECORDED.read_bytes().splitlines(keepends=True):
        yield line
        yield pause(0.0005)


def finish_with_content(events):
    held = next(events)
    for event in events:
        if not content(event):
            held["choices"][0]["finish_reason"] = event["choices"][0]["finish_reason"]
        yield held
        held = event
    yield {"choices": [], "timings": held["timings"]}


def paced(wire, events):
    number = (len(wire.server.fake.requests) - 1) % 5
    before, after = (40, 10, 30, 20, 50)[number] / 1000, (40, 100, 20, 80, 60)[number] / 1000
    stream(pause(before), first(2), pause(0.3), REST, pause(after), DONE)(wire, events)


def thinking(events):
    yield next(events)
    next(events)
    yield "<think>"
    yield from events


def forgetful(wire, events):
    wire.server.fake.forgets = True
    right(wire, events)


def at_speed(token_ms, of_2048):
    """So many milliseconds a token, and so many of an answer of 2048."""

    def answer(wire, events):
        many = wire.request_body["max_tokens"] == 2048
        wire.server.fake.slot.token_ms = of_2048 if many else token_ms
        right(wire, events)

    return answer


def stall_in_turn_3(wire, events):
    turn_3 = len(wire.request_body["messages"]) == 6
    (stream(first(7), SILENCE) if turn_3 else right)(wire, events)


def key_echoed(wire, events):
    wire.error(401, "authentication_error", f"wrong key: {wire.headers['Authorization']}")


def deaf(wire, events):
    wire.left, wire.cancel = lambda seconds: time.sleep(max(0, seconds)), lambda: None
    right(wire, events)


def partly_cached(wire, events):
    thirds = 2 if len(wire.server.fake.requests) > 1 else 3
    change = with_timings(
        lambda t: {**without("cache_n", t), "prompt_n": t["prompt_n"] * thirds // 3}
    )
    change(wire, events)


def taken(wire, slots):
    """The slots; once a client has left, someone else's request is at work, and stays there."""
    if wire.server.fake.closed_ms and not slots[0]["is_processing"]:
        return [dict(slots[0], is_processing=True, id_task=slots[0]["id_task"] + 1)]
    return slots


def after_an_answer(slot, looks):
    """After an answer, a slot (0: the only one, 1: a second) is at work for as many looks."""

    def tell(wire, slots):
        asked = wire.server.fake.paths[-1 - looks : -1]
        other = dict(slots[0], id=slot, is_processing=CHAT in asked, id_task=7)
        wire.json([*slots[:slot], other])

    return tell


def slow_at_work(wire, slots):
    while slots[0]["is_processing"] and not wire.server.fake.closed_ms:
        time.sleep(0.01)
    wire.json(slots)


def slow_after(wire, slots):
    time.sleep(0.3 * bool(wire.server.fake.closed_ms))
    wire.json(slots)


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
HMM = delta(reasoning_content="Hmm. ")
ERROR = b'{"error": {"code": 500, "message": "the GPU fell off", "type": "server_error"}}'
PING = b'event: ping\ndata: {"type": "ping"}\n\nevent: keepalive\ndata: ping\n\n'
EMPTY = [delta(content=None), delta(content=""), delta(), {"choices": [{"delta": None}]}]
EMPTY += [{"choices": []}, {"choices": None, "error": None}]
SEPARATORS = "One\u2028two\u0085three\x0cfour\u2029five. End."
LETTERS = "診療は九時から。 🙂 OK."
DEEP = b"[" * 100_000
TIMINGS = {"cache_n": 0, "prompt_n": 40, "prompt_ms": 1.0, "predicted_n": 4, "predicted_ms": 1.0}
DRIBBLE = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: "

# fmt: off
# ------------------------------------------------------------ right, but unusual
chat("figures_alone",
     "two more events at the end, one with the usage alone, one with the timings alone",
     stream(last(lambda e: [e, {"usage": {"total_tokens": 1}}, {"timings": e["timings"]}]), DONE),
     HARMLESS)
chat("comments", "comments before, between and after the events, also at once after the headers",
     stream(b":\n\n: keep-alive\n\n", each(lambda e: [e, b":\n\n: data: {not an event}\n"]), DONE),
     HARMLESS)
chat("bytewise", "every byte of the first ten events in an HTTP chunk of its own",
     stream(first(10, lambda e: bytewise(data(e))), REST, DONE), HARMLESS)
chat("batched", "three tokens in one event", stream(through(batched), DONE), HARMLESS)
chat("empty_contents",
     "content that is null, empty or missing between the tokens, and no choices at all",
     stream(each(lambda e: [*EMPTY, e]), DONE), HARMLESS)
chat("timings_apart", "the timings on one more event without choices",
     stream(last(lambda e: [without("timings", e), dict(e, choices=[])]), DONE), HARMLESS)
chat("timings_per_token", "timings on every event: the last ones count",
     stream(each(lambda e: [{"timings": dict.fromkeys(TIMINGS, 1), **e}]), DONE), HARMLESS)
chat("no_last_newline", "[DONE] without a newline, and the connection ends",
     stream(REST, b"data: [DONE]", framing="close"), HARMLESS)
chat("connection_close", "Connection: close, no length, and Content-Encoding: Identity",
     raw(STREAM_HEAD + b"Identity\r\nConnection: close\r\n\r\n", REST, DONE), HARMLESS)
chat("late_done", "[DONE] 100 ms after everything else", stream(REST, pause(0.1), DONE), HARMLESS)
chat("no_content_type", "no Content-Type header", stream(REST, DONE, kind=None), HARMLESS)
chat("open_after_done",
     "the connection stays open and silent after [DONE], without even a blank line",
     stream(REST, b"data: [DONE]\n", SILENCE), HARMLESS)
chat("timings_only", "no finish_reason, but llama-server's final timings",
     stream(each(lambda e: [dict(e, choices=[without("finish_reason", e["choices"][0])])]), DONE),
     HARMLESS)
chat("finish_with_content",
     "the finish_reason on the last event with content, and the timings alone behind it",
     stream(through(finish_with_content), DONE), HARMLESS)
chat("named_pings", "events of another type in between, with JSON, with text",
     stream(each(lambda e: [PING, e]), DONE), HARMLESS)
chat("recorded", "the bytes that a real llama-server sent",
     stream(through(recorded), END), tested_in("test_steps.py", "test_streams.py"))
chat("line_separators", "U+2028, U+0085 and others that are no line end here, raw inside the data",
     answering(data(delta(content=SEPARATORS), ascii=False)), tested_in("test_streams.py"))
chat("split_characters", "raw UTF-8, each HTTP chunk one byte long",
     answering(*bytewise(data(delta(content=LETTERS), ascii=False))),
     tested_in("test_streams.py", "test_steps.py"))
chat("long_line", "one line of 3 MB", answering("Long. ", "x" * 3_000_000),
     tested_in("test_streams.py"))
chat("long_answer", "thirty fragments of 8 kB, and after [DONE] the connection stays open",
     stream(first(1), *["x" * 8000, pause(0.01)] * 30, NO_TOKENS, DONE, SILENCE),
     noted("no sentence ended"))
chat("bad_utf_8", "a byte that is not UTF-8 inside the content",
     stream(first(1), b'data: {"choices": [{"delta": {"content": "\xff. Bye."}}]}\n\n', NO_TOKENS,
            DONE), tested_in("test_streams.py"))
chat("half_surrogates", "a character cut in two halves of a surrogate pair, one an event",
     answering("Fine \ud83d", "\ude00. Bye."), tested_in("test_streams.py"))
chat("terminal_codes",
     "an answer that clears the screen, sets a title, rings the bell and forges a line",
     answering("\x1b[2J\x1b]0;owned\x07", "Hi\r", "there\n\x9b31m\u202ewrote.", " Bye."),
     tested_in("test_streams.py"))
chat("slow_second", "the second token 300 ms after the first",
     stream(first(2), pause(0.3), REST, DONE), tested_in("test_steps.py"))
chat("slow_sentences",
     "two sentences, 1.5 s before the white space between them, and again behind it",
     answering("Come", " at 9.", pause(1.5), " Bring", pause(1.5), " ID."),
     tested_in("test_steps.py"))
chat("paced",
     "as slow_second; 10 to 50 ms more in front, and 20 to 100 before [DONE], for each of five",
     paced, tested_in("test_steps.py"))

# ------------------------------------------------------------ true, with something else in it
chat("queued", "200 ms with comments before the prompt is even begun, as in a queue",
     stream(b":\n\n", pause(0.1), b":\n\n", pause(0.1), REST, DONE),
     noted("a first token took ", " by the server's clock", "queue", "network", "suspended",
           by=TTFT))
chat("early_role", 'the role, with "content": "", 150 ms before the prompt is even begun',
     stream(ROLE, pause(0.15), through(lambda events: itertools.islice(events, 1, None)), DONE),
     noted("a first token took ", " by the server's clock"))
chat("timings_early", "a prompt that took longer than the answer",
     with_timings(lambda t: {**t, "prompt_ms": 90_000.0}),
     noted("a first token took ", "90000 by the server's clock", by=TTFT))
chat("buffered", "a proxy that holds everything back until the end", stream(through(list), DONE),
     noted("an answer came in ", " by the server's clock", "buffers", "suspended"))
chat("slow_line", "an answer that takes longer than the server took",
     with_timings(lambda t: {**t, "predicted_ms": 1.0}),
     noted("an answer came in ", " by the server's clock"))
chat("reasoning_first", "120 ms of reasoning before the answer",
     stream(first(1), *[HMM, pause(0.04)] * 3, REST, DONE),
     noted("reasoning came first: ", "ms of the first token's time"))
chat("thinking", "the answer begins with <think>", stream(through(thinking), DONE),
     noted("the answer begins with reasoning (<think>)", "--reasoning-budget 0",
           by=(STEP_2, CACHE, CANCEL, EARLY)))
chat("thoughts_end", "the answer begins with thoughts that </think> ends",
     answering("Hmm. ", "</think>", "Yes. ", "Come."), noted("begins with reasoning (<think>)"))
chat("talkative", "170 fragments, whatever max_tokens says", answering(*["word "] * 170),
     noted("the server ignored max_tokens: 170 tokens for 64", by=TTFT))
chat("overrun", "170 tokens by the server's count, whatever max_tokens says",
     with_timings(lambda t: {**t, "predicted_n": 170}),
     noted("the server ignored max_tokens: 170 tokens for 120"))
chat("stall_in_turn_3", "six fragments of the third turn of a call, and then silence",
     stall_in_turn_3, tested_in("test_call.py"))
chat("forgets_answers", "the slot keeps the prompt, and not the answer", forgetful,
     tested_in("test_call.py"))
chat("recomputes",
     "a model with recurrent memory, or --no-cache-prompt: every prompt is computed whole",
     asked_for(cache_prompt=False),
     noted("second reused nothing", "sliding window", "--no-cache-prompt", "another request",
           by=CACHE),
     noted("second and changed_suffix reused nothing", by=f"{CACHE} --changed-suffix"))
chat("deaf", "a relay that swallows the hang-up: the server goes on to the end", deaf,
     tested_in("test_faults.py"))

# ------------------------------------------------------------ the cache is on
chat("cache_always", "a proxy that drops cache_prompt, so that the cache stays on",
     asked_for(cache_prompt=True),
     fails("from a cache", "cache_prompt is false", by=(TTFT, PREFILL)))
chat("cache_always_untold", "the cache stays on, and the timings have no cache_n",
     asked_for(with_timings(lambda t: without("cache_n", t)), cache_prompt=True),
     fails("all but 1 token for 17 words", "came from a cache",
           "cache_prompt is false"))
chat("cache_partly_untold",
     "a third of the prompt from a cache after the first request, and no cache_n", partly_cached,
     fails("59, 39, 39, 39, 39 tokens", "the KV cache was on"))
chat("cached_untold", "timings without cache_n", with_timings(lambda t: without("cache_n", t)),
     noted("can't verify that the cache was off", by=PREFILL))
chat("everything_kept_untold", "one token computed of every prompt, and no cache_n",
     with_timings(lambda t: without("cache_n", {**t, "prompt_n": 1, "predicted_n": 1})),
     fails("first was answered from a cache already", by=CACHE))
chat("all_cached", "a fifth of every prompt out of a cache",
     with_timings(lambda t: {**t, "cache_n": t["prompt_n"] // 4}),
     fails("first was answered from a cache already", "tokens reused", "--cache-ram 0", by=CACHE))

# ------------------------------------------------------------ refusals
chat("too_long", "400: the prompt exceeds the context",
     refuse(400, "request (6016 tokens) exceeds the available context size (4096 tokens)"),
     fails("400", "request (6016 tokens) exceeds the available context size", "shorten the prompt",
           "-np 1", by=(STEP_2, CACHE)))
chat("context_exceeded", "500: the context of a build that says so in other words",
     refuse(500, "Context size has been exceeded."),
     fails("500", "Context size", "shorten the prompt"))
chat("router", "400 of a llama-server that was started without a model",
     refuse(400, "model name is missing from the request"),
     fails("400", "model name is missing", "router", "(-m)"))
chat("bad_request", "400 with a cause that is not known here",
     refuse(400, "Assistant message must contain content"),
     fails("400", "must contain content", "look at the server's log"))
chat("loading", "503 while the model is loading", refuse(503, "Loading model"),
     fails("503", "Loading model", "wait until the model is loaded"))
chat("key_echoed", "401 that repeats the key", key_echoed, tested_in("test_edges.py"))
chat("unauthorized", "401: an API key is asked for", refuse(401, "Invalid API Key\x1b[2J"),
     fails("401", "Invalid API Key\\x1b[2J", "VOICE_LLM_API_KEY", "--api-key"))
chat("proxy_page", "a proxy's 502 page", page(502, "502 Bad\nGateway"),
     fails("502", "502 Bad Gateway", "proxy can't reach llama-server"))
chat("too_large", "413 with a web page", page(413, "Request Entity Too Large"),
     fails("413", "Too Large", "limits the size"))
chat("rate_limited", "429 with a web page", page(429, "Too Many Requests"),
     fails("429", "Too Many", "limits the size or the number of requests"))
chat("redirect", "301 to somewhere else",
     raw(b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"),
     fails("301", "redirect", "VOICE_LLM_URL"))
chat("login_page", "a web page with status 200", page(200, "Sign in"),
     fails("text/html", "Sign in", "is this a llama-server"))
chat("text_plain", "an event stream that never ends, labelled text/plain",
     stream(REST, forever(b":\n\n"), kind="text/plain"),
     fails("text/plain", "not an event stream", "is this a llama-server"))
chat("not_streaming", "a whole JSON answer instead of a stream",
     reply({"choices": [{"message": {"role": "assistant", "content": "Hello."}}]}),
     fails("application/json", "not an event stream"))
chat("json_error_200", "an error as JSON, with status 200",
     reply({"error": {"message": "out of memory"}}), fails("out of memory"))
chat("not_http", "bytes that are no HTTP", raw(b"\x16\x03\x01 SSH-2.0-nothing\r\n\r\n"),
     fails("no answer"))
chat("hung_up", "the connection ends before any answer", raw(HANG_UP),
     fails("no answer", "(Remote end closed connection without response)"))
chat("error_body_silent", "500, and then its body never comes",
     raw(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 100\r\n\r\n", SILENCE),
     fails("500"))
chat("compressed", "a body that a proxy has compressed with gzip",
     raw(STREAM_HEAD + b"gzip\r\nContent-Length: 20\r\n\r\n" + bytes(20)),
     fails("gzip", "remove the proxy"))

# ------------------------------------------------------------ cut off
chat("cut_between_chunks", "the connection ends between two HTTP chunks", stream(FIVE, HANG_UP),
     fails("4 fragments but no [DONE] before the connection ended", by=(TTFT, CANCEL)))
chat("cut_inside_line", "the connection ends inside a line",
     stream(FIVE, unframed(b'ff\r\ndata: {"choices": [{"del'), HANG_UP),
     fails("but no [DONE] before"))
chat("cut_close", "the connection ends inside a line of a body without a length",
     stream(FIVE, b'data: {"choices": [{"del', framing="close"), fails("but no [DONE] before"))
chat("cut_reset", "the connection is reset", stream(FIVE, pause(0.5), RESET),
     fails("(Connection reset by peer)"))
chat("no_done", "a clean end, with finish_reason and timings, but no [DONE]", stream(REST, END),
     fails("but no [DONE] before"))
chat("empty_stream", "headers, and a clean end", stream(END),
     fails("0 fragments but no [DONE] before"))
chat("bad_chunk", "an HTTP chunk whose size is no number",
     stream(FIVE, unframed(b"zz\r\n\r\n"), HANG_UP), fails("but no [DONE] before"))
chat("huge_chunk", "an HTTP chunk whose size is beyond every number of bytes",
     stream(FIVE, unframed(b"F" * 20 + b"\r\ndata: {}\n\n"), SILENCE),
     fails("but no [DONE] before"))
chat("runaway_line", "a line without an end", stream(forever(b"x" * 2**20, 0), framing="close"),
     fails("a line of more than"))
chat("polite_cut", "[DONE] after five events, without a finish_reason", stream(FIVE, DONE),
     fails("cut short", "[DONE] after 4 fragments", "finish_reason None", by=(TTFT, CANCEL)))
chat("polite_cut_timings",
     "[DONE] after five events, each with timings, and without a finish_reason",
     stream(through(lambda events: (dict(e, timings=TIMINGS) for e in itertools.islice(events, 5))),
          DONE), fails("cut short", "[DONE] after 4 fragments", "finish_reason None"))
chat("finish_filter", "finish_reason content_filter, and [DONE]",
     stream(FIVE, finish("content_filter"), DONE),
     fails("cut short", "finish_reason 'content_filter'"))
chat("short", "an answer of three tokens", stream(first(4), finish("stop"), DONE),
     fails("the answer had ended before the close", "void", by=CANCEL))

chat("fast", "256 tokens at once, but one every 50 ms of 2048", at_speed(0, 50),
     tested_in("test_edges.py"))
chat("too_fast", "every answer at once", at_speed(0, 0),
     fails("the answer had ended before the close", "slower model", "void", by=CANCEL))

# ------------------------------------------------------------ for ever
chat("silence", "no headers, nothing, for ever", raw(SILENCE), for_ever("no answer"),
     void("had not answered", "too far away", "refuse"),
     void("had not accepted", "too far away", "refuse", by=EARLY))
chat("silence_after_headers", "headers, and then nothing for ever", stream(SILENCE),
     for_ever("0 fragments"), void("prefill", "KV cache"))
chat("silence_after_role", "headers and the role, and then nothing for ever",
     stream(first(1), SILENCE), void("prefill", "KV cache"))
chat("only_comments", "a comment every 20 ms for ever", stream(forever(b":\n\n")),
     for_ever("0 fragments"), void("prefill", "KV cache"))
chat("reasoning_for_ever", "reasoning every 20 ms for ever", stream(ROLE, forever(HMM)),
     void("only reasoning", "--reasoning-budget 0"),
     void("the first token came before the close", by=EARLY))
chat("stall", "five events, and then silence", stream(FIVE, SILENCE), for_ever("4 fragments"),
     hung_up(4))
chat("stall_close", "five events with Connection: close, and then silence",
     stream(FIVE, SILENCE, framing="close"), for_ever("4 fragments"), hung_up(4))
chat("dribble", "five events, and then one event byte by byte, every 20 ms, for ever",
     stream(FIVE, b"data: ", forever(b" ")), for_ever("4 fragments"), hung_up(4))
chat("dribble_headers", "headers byte by byte, every 20 ms, for ever",
     raw(b"HTTP/1.1 200 OK\r\nX-Slow: ", forever(b"x")), for_ever("0 fragments"),
     void("had not answered"))
chat("finish_and_silence", "finish_reason and timings, and then silence", stream(REST, SILENCE),
     for_ever("no [DONE]"))
chat("short_finish_and_silence", "three tokens, finish_reason, and then silence",
     stream(first(4), finish("stop"), SILENCE), void("the answer had ended before the close"))

# ------------------------------------------------------------ errors and lies in the stream
chat("error_event", "an error as an event, after content",
     stream(FIVE, b"data: " + ERROR + b"\n\n", END),
     fails("the GPU fell off", "after 4 fragments", by=(TTFT, CANCEL)))
chat("error_event_first", "an error as an event, before any content",
     stream(b"data: " + ERROR + b"\n\n", END), fails("the GPU fell off", "after 0 fragments"))
chat("error_event_and_done", "an error as an event, and the answer goes on to [DONE]",
     amid(b"data: " + ERROR + b"\n\n"), fails("the GPU fell off"))
chat("error_text", "an error whose value is text", amid({"error": "the GPU fell off"}),
     fails("the GPU fell off"))
chat("error_object", "an object of type error",
     amid({"object": "error", "message": "the GPU fell off"}), fails("the GPU fell off"))
chat("error_beside_choices", "an error in a chunk that is right otherwise, as OpenRouter's",
     amid({**delta(), "error": {"message": "the GPU fell off"}}),
     fails("the GPU fell off", "reported an error"))
chat("error_field", "a bare error: line", amid(b"error: " + ERROR + b"\n\n"),
     fails("the GPU fell off"))
chat("error_field_first", "a bare error: line before any content",
     stream(b"error: " + ERROR + b"\n\n", END), fails("the GPU fell off"))
chat("error_json", "bare JSON in the stream", amid(ERROR + b"\n"), fails("the GPU fell off"))
chat("error_finish", "finish_reason error", amid(finish("error")),
     fails("cut short", "finish_reason 'error'"))
chat("error_code", "FastChat's error, and [DONE]",
     amid({"text": "the GPU fell off", "error_code": 50002}),
     fails("the GPU fell off", "reported an error"))
chat("error_detail", "FastAPI's error, and [DONE]", amid({"detail": "the GPU fell off"}),
     fails("the GPU fell off", "reported an error"))
chat("error_context", "a full context",
     stream(FIVE, {"error": {"message": "Context size has been exceeded."}}, END),
     fails("Context size", "shorten the prompt"))
chat("error_named", "an event of type error", amid(b"event: error\ndata: the GPU fell off\n\n"),
     fails("the GPU fell off"))
chat("null_event", "an event that is null", amid(b"data: null\n\n"),
     fails("not JSON as the API has it"))
chat("not_json", "an event that is not JSON", amid(b"data: {oops\n\n"), fails("not JSON", "{oops"))
chat("not_an_object", "an event that is JSON, but no object", amid(b"data: [1, 2]\n\n"),
     fails("not JSON as the API has it"))
chat("deep_json", "JSON nested 100,000 deep", amid(b"data: " + DEEP + b"\n\n"), fails("not JSON"))
chat("content_a_number", "content that is a number", amid(delta(content=5)),
     fails("not JSON as the API has it"))
chat("choices_a_text", "choices that are a text", amid(b'data: {"choices": "none"}\n\n'),
     fails("not JSON as the API has it"))
chat("joined_events", "[DONE] in one event with something else",
     stream(FIVE, b"data: {}\ndata: [DONE]\n\n", END), fails("not JSON"))
chat("no_content", "an answer without content",
     stream(NO_TOKENS, DONE),
     fails("no content in 22 tokens", "half a character", "max_tokens"),
     fails("no content", by=EARLY))
chat("no_content_untold", "an answer without content or timings",
     stream(NO_TOKENS_UNTOLD, DONE), fails("no content: is it a chat model?"))
chat("only_reasoning", "an answer of nothing but reasoning",
     stream(each(lambda e: [delta(reasoning_content=content(e)) if content(e) else e]), DONE),
     fails("only reasoning", "--reasoning-budget 0"))

# ------------------------------------------------------------ timings
chat("no_timings", "no timings at all", stream(last(lambda e: [without("timings", e)]), DONE),
     fails("the server's timings lack p", by=(TTFT, PREFILL, CACHE)),
     noted("can't verify that the cache was off", by=STEP_2))
chat("timings_null", "timings that are null", with_timings(lambda t: None),
     fails("the server's timings lack predicted_n: is it a llama-server"))
chat("timings_text", "timings that are a text", with_timings(lambda t: "fast"),
     fails("timings lack predicted_n"))
chat("timings_empty", "timings without a key", with_timings(lambda t: {}),
     fails("timings lack p", by=(TTFT, PREFILL)))
chat("timings_nan", "timings that are not a number",
     with_timings(lambda t: dict.fromkeys(t, float("nan"))),
     fails("nan", "as predicted_n"))
chat("timings_true", "timings that are true", with_timings(lambda t: dict.fromkeys(t, True)),
     fails("True", "as predicted_n"))
chat("timings_huge", "timings beyond every number",
     with_timings(lambda t: dict.fromkeys(t, 10**400)), fails("as predicted_n"))
chat("timings_fraction", "counts that are not whole",
     with_timings(lambda t: {**t, "prompt_n": 12.5, "predicted_n": 12.5}),
     fails("12.5 as p", by=(TTFT, PREFILL)))

# ------------------------------------------------------------ /slots
slots("slots_off", "501, as with --no-slots",
      refuse(501, "This server does not support slots endpoint. Start it with `--slots`"),
      fails("/slots", "501", "--no-slots", by=CANCEL),
      noted("can't verify that the server was idle", "--no-slots", by=(STEP_2, SENTENCE)))
slots("slots_missing", "404, as from another kind of server", refuse(404, "File Not Found"),
      fails("/slots", "404", "is this a llama-server", by=CANCEL),
      noted("can't verify that the server was idle", "404"))
slots("slots_401", "401: an API key is asked for", refuse(401, "Invalid API Key"),
      fails("/slots", "401", "VOICE_LLM_API_KEY", by=CANCEL))
slots("slots_page", "a web page", reply(b"<html>"),
      fails("/slots", "is this a llama-server", by=CANCEL))
slots("slots_deep", "JSON that no reader can take apart", reply(DEEP),
      fails("/slots", "is this a llama-server", by=CANCEL))
slots("slots_shape", "JSON of another shape", reply({"slots": [{"is_processing": False}]}),
      fails("/slots", "is this a llama-server", by=CANCEL))
slots("slots_busy", "a slot that never becomes idle",
      states(lambda slot: dict(slot, is_processing=True)),
      fails("still busy", "restart the server", by=(TTFT, CANCEL), limit=LIMIT))
slots("slots_silence", "no answer", raw(SILENCE),
      fails("this step needs /slots", "no answer after", by=CANCEL, limit=LIMIT),
      noted("can't verify that the server was idle", "no answer after", by=TTFT, limit=2 * LIMIT))
slots("slots_cached", "a proxy that caches: always idle",
      states(lambda slot: dict(slot, is_processing=False)),
      void("/slots showed no slot at work", "caches"))
slots("slots_without_id", "no id_task, as in old builds",
      states(lambda slot: without("id_task", slot)), tested_in("test_faults.py"))
slots("slots_taken",
      "someone else's request takes the slot as soon as a client has hung up, and keeps it",
      lambda wire, slots: wire.json(taken(wire, slots)), tested_in("test_faults.py"))
slots("slots_taken_without_id", "someone else's request takes the slot, and there is no id_task",
      lambda wire, slots: wire.json([without("id_task", slot) for slot in taken(wire, slots)]),
      Expected("fails", (CANCEL,), ("still busy", "after the close"), LIMIT, cut=2))
slots("slots_next_caller", "someone else's request takes the one slot as soon as an answer ends",
      after_an_answer(0, 2), HARMLESS)
slots("slots_second_busy", "a second slot that is busy while an answer ends and a little longer",
      after_an_answer(1, 2), noted("another slot was busy", "shared the machine"))
slots("slots_second_ends",
      "a second slot that is busy at the first look after an answer, and not at the next",
      after_an_answer(1, 1), HARMLESS)
slots("slots_two_at_work", "a second slot that works whenever the first does",
      lambda wire, slots: wire.json([*slots, dict(slots[0], id=1, id_task=7)]),
      void("2 requests were at work", "-np 1"))
slots("slots_slow", "an answer that takes 300 ms once a client has hung up", slow_after,
      noted("nobody saw whether the slot was busy", "may have been idle", "network", by=CANCEL))
slots("slots_slow_at_work", "no answer while a slot is at work", slow_at_work,
      void("/slots did not answer between the first token and the close"))

# ------------------------------------------------------------ /health, and every GET
health("health_page", "a web page", page(200, "Router"),
       fails("/health", "200", "is this a llama-server", by=STEP_1))
health("health_error", "an error with status 200", reply({"error": "no such path"}),
       fails("/health", "no such path", by=STEP_1))
health("health_503", "503 with a web page", page(503, "503 Service Unavailable"),
       fails("/health", "503", "a proxy can't reach llama-server", by=STEP_1))
health("health_silence", "no answer", raw(SILENCE),
       fails("/health: no answer after 5 s", "restart", by=STEP_1))
health("health_dribble", "a byte every 20 ms, for ever", raw(DRIBBLE, forever(b" ")),
       fails("/health: no answer after 3 s", by=STEP_1, limit=LIMIT))
get("get_dropped", "the connection ends before any answer", raw(HANG_UP),
    fails("this step needs /slots", "no answer (Remote end closed", by=CANCEL),
    noted("can't verify that the server was idle", "no answer", by=(STEP_2, SENTENCE)))
get("get_silence", "no answer", raw(SILENCE),
    noted("can't verify that the server was idle", "no answer after", limit=2 * LIMIT))
get("get_dribble", "a byte every 20 ms, for ever", raw(DRIBBLE, forever(b" ")),
    noted("can't verify that the server was idle", "no answer after", limit=2 * LIMIT))
# fmt: on
