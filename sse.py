#!/usr/bin/env python3
"""Step 2: read a streaming answer by hand, line by line, and keep every line.

python3 sse.py            asks one question, shows the answer, and writes
                          sse_raw.txt   every line just as it was received
                          chunks.jsonl  {"t_ms", "text"} for each fragment
                          request.json  the request as it was sent
                          sse.py        this file, unless one is there
python3 sse.py --server   step 1: waits until the server is ready, writes
                          health.json   what /health answered
                          props.json    what /props answered
"""

import argparse
import contextlib
import http.client
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from urllib.parse import urlsplit

if sys.version_info < (3, 9):  # noqa: UP036
    sys.exit(f"this is Python {sys.version.split()[0]}: use 3.9 or later")

SYSTEM = "You are a clinic phone assistant. Answer in one short sentence."
QUESTION = "What should a new patient bring?"
SETTINGS = {  # name: (default, meaning)
    "VOICE_LLM_URL": ("http://127.0.0.1:8080", "the llama-server"),
    "VOICE_LLM_API_KEY": ("", "the server's key, if it asks for one"),
    "VOICE_LLM_OUT": ("/root/voice/llm", "the folder of the results; made if missing"),
    "VOICE_LLM_KB": ("/opt/lab/fixtures/voice/kb", "the documents: *.md, UTF-8; none: do without"),
    "VOICE_LLM_SYSTEM": ("", "a text file: your system prompt, not the lab's"),
    "VOICE_LLM_QUESTION": ("", "your caller's question; for --call, several lines"),
    "VOICE_LLM_TIMEOUT": ("120", "seconds: the longest wait for an answer or a slot"),
}
SIMULATED = "simulated: a fake server without a model"  # its model_path
MAX_BYTES = 8 * 2**20  # of a line
HTTP_ERRORS = (OSError, ValueError, OverflowError, http.client.HTTPException)
CHAT, DONE = "/v1/chat/completions", b"[DONE]"
LOG, IS_IT = "look at the server's log", "is it a llama-server?"
ITSELF = "set VOICE_LLM_URL to llama-server itself"
NO_REASONING = "start llama-server with --reasoning-budget 0"
clock = time.perf_counter
notes = {}  # what else is in a figure, {topic: (size, text)}: run() prints them


class Failure(Exception):
    """Why there is no figure: a message for a person, what happened and what to do."""


class NoAnswer(Failure):
    """The server did not answer."""


def plural(number, thing):
    """'1 token', '2 tokens'."""
    return f"{number} {thing}{'s' * (number != 1)}"


# ---- settings
def setting(name):
    """The setting `name`, text; its default where it is unset or blank."""
    return os.environ[name] if os.environ.get(name, "").strip() else SETTINGS[name][0]


def timeout():
    """VOICE_LLM_TIMEOUT in seconds. Raises Failure where it is none."""
    text = setting("VOICE_LLM_TIMEOUT")
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e6:
            return float(text)
    raise Failure(f"VOICE_LLM_TIMEOUT is {text!r}: set it to seconds, up to 1000000")


def address():
    """(host, port, path prefix) of VOICE_LLM_URL. Raises Failure."""
    text, wrong = setting("VOICE_LLM_URL"), "start with http://"
    if text.lower().startswith("http://"):
        wrong = "have a host, a port below 65536, and no user, password, space, ? or #"
        with contextlib.suppress(ValueError):  # a port that is not a number
            url = urlsplit(text)
            if url.hostname and all("!" <= c <= "~" and c not in "@?#" for c in text):
                return url.hostname, 80 if url.port is None else url.port, url.path.rstrip("/")
    raise Failure(f"VOICE_LLM_URL must {wrong}, e.g. http://127.0.0.1:8080")


def url_of(path):
    """The URL of `path`, for a message."""
    return setting("VOICE_LLM_URL").rstrip("/") + path


def headers():
    """The headers of every request. Raises Failure where the key can't be in one."""
    key = setting("VOICE_LLM_API_KEY")
    if not all(" " <= c <= "~" for c in key):
        raise Failure("VOICE_LLM_API_KEY has a line end or non-ASCII: set it to the key alone")
    login = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Content-Type": "application/json", **login}


def questions(*defaults):
    """The lines of VOICE_LLM_QUESTION, or `defaults` → [str, …]. Raises Failure."""
    try:
        text = os.fsencode(setting("VOICE_LLM_QUESTION")).decode("utf-8")
    except UnicodeError:
        raise Failure("VOICE_LLM_QUESTION is not UTF-8: convert it, or unset it") from None
    return [line.strip() for line in text.split("\n") if line.strip()] or list(defaults)


def read_text(path, what_to_do):
    """The stripped text of a UTF-8 file. Raises Failure."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait
            raise OSError("not a file")
        with open(path, encoding="utf-8-sig") as file:
            return file.read().strip()
    except UnicodeDecodeError as error:
        why = f"not UTF-8, byte {error.start}"
    except (OSError, ValueError) as error:
        why = reason(error)
    raise Failure(f"can't read {path} ({why}): {what_to_do}")


def system_prompt(default):
    """The text of the file VOICE_LLM_SYSTEM, or `default`. Raises Failure."""
    path, hint = setting("VOICE_LLM_SYSTEM"), "set VOICE_LLM_SYSTEM to a UTF-8 text, or unset it"
    text = read_text(path, hint) if path else default
    if not text:
        raise Failure(f"{path} is blank: {hint}")
    return text


def check_settings():
    """Raise Failure where a setting can't be used."""
    address(), timeout(), headers(), questions()


# ---- one request
ADVICE = (  # HTTP statuses; what the error says; what to do: the first that fits
    ((), "context size", "shorten the prompt, or start llama-server with a larger -c, or -np 1"),
    ((), "model name is missing", "this llama-server is a router: start it with a model (-m)"),
    ((301, 302, 303, 307, 308), "", f"this is a redirect: {ITSELF}"),
    ((401, 403), "", f"set VOICE_LLM_API_KEY to its key, start it without --api-key, or {ITSELF}"),
    ((200, 404, 405), "", "is this a llama-server, and VOICE_LLM_URL its address without a path?"),
    ((413, 429), "", f"a proxy limits the size or the number of requests: raise that, or {ITSELF}"),
    ((501,), "", "restart llama-server as its message says (for slots: without --no-slots)"),
    ((503,), "loading", "wait until the model is loaded, and run this again"),
    ((502, 503, 504), "", f"a proxy can't reach llama-server: start it, or {ITSELF}"),
    ((), "", LOG),
)


def refusal(path, did, data, status=None):
    """The message for what a server did ("answered 503", say) and said: `data`."""
    text = data.decode("utf-8", "replace").lower().replace("_", " ")
    hints = (hint for at, says, hint in ADVICE if (not at or status in at) and says in text)
    return f"{url_of(path)} {did}: {error_text(data)}: {next(hints)}"


def parsed(data):
    """The value of JSON bytes; None where they are none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(data)


def error_text(data):
    """What a server's error says, bytes of JSON, HTML or text, as short text."""
    text = data[:65536].decode("utf-8", "replace")
    found = parsed(text)
    if found is None:
        title = text.partition("<title>")[2].partition("</title>")[0]
        found = f"a web page, {title}" if title else text
    for key in "error", "message", "detail", "text":
        found = (isinstance(found, dict) and found.get(key)) or found
    found = found if isinstance(found, str) else json.dumps(found)
    if key := setting("VOICE_LLM_API_KEY"):
        found = found.replace(key, "***")
    return " ".join(found.split())[:300] or "nothing"


def reason(error):
    """What an error says."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class Request:
    """One request on a connection of its own, with one deadline for all of it.

    start is the clock() just before it was sent, response http.client's after open(), closed_at_ms
    the time of close(), late whether the deadline closed it, cause why the connection ended.
    """

    def __init__(self, method, path, seconds, body=None):
        (host, port, prefix), fields = address(), headers()
        self.seconds, self.late, self.cause = seconds, False, ""
        self.response = self.closed_at_ms = None
        self._connection = http.client.HTTPConnection(
            host, port, timeout=timeout() if body else seconds
        )
        try:
            self._connection.connect()
        except (OSError, ValueError) as error:  # ValueError: a host name that DNS can't carry
            hint = "start llama-server (on the Pod: voice-llm up), or set VOICE_LLM_URL"
            raise Failure(f"no server answers at {url_of('')} ({reason(error)}): {hint}") from None
        # Kept: with "Connection: close", getresponse() takes the socket from the connection, whose
        # close() then leaves it open, and the server goes on.
        self._socket = self._connection.sock
        self._socket.settimeout(seconds)  # for sending
        self.start = clock()
        try:
            self._connection.request(method, prefix + path, body, fields)
        except HTTP_ERRORS as error:
            self.cause = reason(error)  # an early answer (413, say) may still be there
        # A socket timeout starts again with every byte: a comment now and then defeats it.
        self._socket.settimeout(None)
        self._timer = threading.Timer(self.start + seconds - clock(), self._expire)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._timer.cancel()
        self.close()
        if self.response:
            self.response.close()
        self._connection.close()

    def _expire(self):
        self.late = self.closed_at_ms is None
        self.close()

    def close(self):
        """Close the TCP connection now, from any thread."""
        if self.closed_at_ms is None:
            self.closed_at_ms = self._ms(clock())
            with contextlib.suppress(OSError):
                self._socket.shutdown(2)  # its close() would not wake the reader

    def _ms(self, at):
        return round((at - self.start) * 1000, 3)

    def open(self):
        """Read the headers → response; None where none came."""
        try:
            self.response = self._connection.getresponse()
        except HTTP_ERRORS as error:
            self.cause = self.cause or reason(error)
        return self.response


def get(path, seconds=None):
    """GET `path` → (HTTP status, body as bytes). Raises Failure, NoAnswer where no whole answer
    comes within `seconds` (None: VOICE_LLM_TIMEOUT)."""
    limit, body = seconds or timeout(), None
    with Request("GET", path, limit) as request:
        with contextlib.suppress(*HTTP_ERRORS):
            body = request.open() and request.response.read(MAX_BYTES)
        if body is not None and not request.late:
            return request.response.status, body
    why = f"after {limit:g} s" if request.late else f"({request.cause or 'it broke off'})"
    raise NoAnswer(f"{url_of(path)}: no answer {why}: {LOG}, or restart it")


# ---- the event stream
def events(lines):
    """Yield (time, type, data as bytes) for each event in `lines`, pairs of (time, line as bytes).

    The rules: https://html.spec.whatwg.org/multipage/server-sent-events.html; the time is that of
    the last data line. Four things differ: `[DONE]` ends the stream. An `error:` line or bare JSON,
    of servers that break down, is of type "error". White space, a heartbeat, is no event. A lone
    CR ends no line.
    """
    event_type, data, at, bom = b"message", [], None, b"\xef\xbb\xbf"
    for now, line in lines:
        line, bom = line.removeprefix(bom).rstrip(b"\r\n"), b""
        field, _, value = line.partition(b":")  # a comment is a field without a name
        value = value.removeprefix(b" ")
        if not line:
            if any(part.strip() for part in data):
                yield at, event_type, b"\n".join(data)
            event_type, data = b"message", []
        elif field == b"data":
            data.append(value)
            at = now
            if len(data) == 1 and value.strip() == DONE:
                yield at, event_type, DONE
                return
        elif field == b"event":
            event_type = value or b"message"
        elif field == b"error" or line[:1] == b"{":
            yield now, b"error", value if field == b"error" else line


# ---- one answer
class Answer(Request):
    """A streaming answer of /v1/chat/completions. Use it in a `with`, which closes the connection.

    Iterating yields fragments as they arrive, {"t_ms": float, "text": str}: one for each event
    with content; a role alone and a comment are none. It ends after a whole answer (`[DONE]`, and
    before it a finish_reason of stop or length, or llama-server's final timings), after close(), or
    after `cut_after` seconds. All else raises Failure: an error, an answer cut short or empty, a
    prompt out of a cache though `cache_prompt` is False. `raw_out`, a binary file, gets every line;
    the request, all other `fields`.

    body            the request as it was sent, bytes
    accepted_ms     of the headers: llama-server begins with the prompt
    first_token_ms  of the first event with content or reasoning
    total_ms        of [DONE]; all times are milliseconds since start, None before
    received        fragments so far
    finish_reason   why the answer ended
    timings         the server's own, or {}: prompt_n, prompt_ms, cache_n, predicted_n,
                    predicted_ms (tools/server/README.md of llama.cpp)
    """

    def __init__(
        self, messages, max_tokens=64, cache_prompt=True, raw_out=None, cut_after=None, **fields
    ):
        body = {"messages": messages, "stream": True, "max_tokens": max_tokens, "temperature": 0}
        self.body = to_json({**body, "seed": 7, "cache_prompt": cache_prompt, **fields})
        self.max_tokens, self.cache_prompt = max_tokens, cache_prompt
        self.raw_out, self.cut_after = raw_out, cut_after
        self.total_ms = self.accepted_ms = self.first_token_ms = self.finish_reason = None
        self.timings, self.received, self._final_timings = {}, 0, False
        words = (str(message.get("content") or "").split() for message in messages)
        self._prompt_words = sum(map(len, words))
        super().__init__("POST", CHAT, timeout() if cut_after is None else cut_after, self.body)

    def __iter__(self):
        if self.open() and self.closed_at_ms is None:  # a close may have cut the headers short
            self._check_headers()
            for at, event_type, data in events(self._lines()):
                if data == DONE:
                    self.total_ms = self._ms(at)
                    break
                if text := self._content(at, event_type, data):
                    self.received += 1
                    yield {"t_ms": self._ms(at), "text": text}
        on_purpose = self.cut_after is not None or not self.late
        if self.total_ms is None and self.closed_at_ms is not None and on_purpose:
            return
        if why := self._cut_short() or self._warm():
            raise self._failure(why)

    def _failure(self, why):
        return Failure(f"{url_of(CHAT)}: {why}")

    def _lines(self):
        """Yield (clock() after readline, line) until the connection ends."""
        while True:
            try:
                line = self.response.readline(MAX_BYTES)
            except HTTP_ERRORS as error:
                line, self.cause = b"", reason(error)
            now = clock()
            if len(line) == MAX_BYTES:
                line, self.cause = b"", f"a line of more than {MAX_BYTES} bytes"
            if not line or (self.closed_at_ms is not None and self._ms(now) >= self.closed_at_ms):
                return  # what is still in the buffer was not received before
            if self.raw_out is not None:
                self.raw_out.write(line)
            yield now, line

    def _check_headers(self):
        """Raise Failure where what comes is no event stream."""
        status, media_type = self.response.status, self.response.getheader("Content-Type", "")
        did = f"answered {status}" if status != 200 else ""
        if media_type and "text/event-stream" not in media_type.lower():
            did = did or f"answered with {media_type}, not an event stream"
        if did:
            data = b""
            self._socket.settimeout(1)  # the rest may never come
            with contextlib.suppress(*HTTP_ERRORS):
                data = self.response.read1(65536)
            raise Failure(refusal(CHAT, did, data, status))
        coding = self.response.getheader("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise self._failure(f"the answer is in {coding}: remove the proxy that compresses it")
        self.accepted_ms = self._ms(clock())

    def _content(self, at, event_type, data):
        """The content of an event, or ""; what else it tells is kept."""
        got = plural(self.received, "fragment")
        if event_type == b"error":
            raise Failure(refusal(CHAT, f"reported an error after {got}", data))
        if event_type != b"message" and b'"choices"' not in data:
            return ""  # a ping, say
        try:
            event = json.loads(data.decode("utf-8", "replace"))
            choice = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            content, timings = delta.get("content") or "", event.get("timings")
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if not isinstance(content, str):
                raise TypeError
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            why = f"an event is not JSON as the API has it: {error_text(data)}"
            raise self._failure(f"{why}: {IS_IT}") from None
        if event.get("error") or not event.keys() & {"choices", "timings", "usage"}:
            raise Failure(refusal(CHAT, f"reported an error after {got}", data))
        if content or thought:
            self._final_timings = False
            self.first_token_ms = self.first_token_ms or self._ms(at)
        if isinstance(timings, dict):  # they may be on every event: the last ones count
            self.timings, self._final_timings = timings, not (content or thought)
        self.finish_reason = self.finish_reason or choice.get("finish_reason")
        return content

    def _cut_short(self):
        """Why the answer is not whole; "" where it is."""
        got, again = plural(self.received, "fragment"), f"{LOG}, and run this again"
        if self.total_ms is None:
            got = f"{got} but no [DONE]" if self.response else "no answer"
            if self.late:
                return (
                    f"{got} after {self.seconds:g} s: {LOG}, or allow more with VOICE_LLM_TIMEOUT"
                )
            return f"{got} before the connection ended ({self.cause or 'no more came'}): {again}"
        whole = self.finish_reason in ("stop", "length")
        if not whole and (self.finish_reason or not self._final_timings):
            end = f"finish_reason {self.finish_reason!r:.40}"
            return f"the answer was cut short: [DONE] after {got}, {end}: {again}"
        if self.received:
            return ""
        if self.first_token_ms is not None:
            return f"the answer has only reasoning and no content: {NO_REASONING}"
        if predicted_n := number(self.timings, "predicted_n"):
            got = plural(predicted_n, "token")
            return f"no content in {got}, half a character perhaps: raise max_tokens, or {LOG}"
        return "the answer has no content: is it a chat model?"

    def _warm(self):
        """What came from a cache that was to be off; "" where nothing did."""
        cached, computed = (number(self.timings, key) for key in ("cache_n", "prompt_n"))
        what, words = plural(cached, "token"), self._prompt_words
        if cached is None and computed is not None and computed < words / 2:
            what = f"all but {plural(computed, 'token')} for {words} words"  # one a word, or more
            cached = True
        if self.cache_prompt or not cached:
            return ""
        return f"{what} of the prompt came from a cache, though cache_prompt is false: {ITSELF}"


def stream(messages, max_tokens=64, cache_prompt=True, raw_out=None, **fields):
    """Send `messages`, read the answer → ([fragment, …], total_ms, timings): Answer. raw_out:
    a path, written at the end, or an open file."""
    path = raw_out if isinstance(raw_out, (str, os.PathLike)) else None
    file = io.BytesIO() if path else getattr(raw_out, "buffer", raw_out)  # of text, its bytes
    with Answer(messages, max_tokens, cache_prompt, file, None, **fields) as answer:
        chunks = list(answer)
    if path:
        save({path: file.getvalue()})
    look_back(answer, chunks)
    return chunks, answer.total_ms, answer.timings


def chat(system, *said):
    """The messages of a call: system prompt, then what caller and assistant said, in turn."""
    turns = zip(itertools.cycle(("user", "assistant")), said)
    messages = [("system", system), *turns]
    return [{"role": role, "content": text} for role, text in messages]


def is_number(value):
    """Whether `value` is a number from 0 up, not NaN or Infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15


def number(timings, key):
    """The number `key` of a server's timings, None where it is none."""
    return timings.get(key) if is_number(timings.get(key)) else None


def required_timing(timings, key):
    """The same; a count, *_n, is whole. Raises Failure where there is none."""
    value = number(timings, key)
    if value is not None and (value == int(value) or not key.endswith("_n")):
        return value
    found = f"have {timings[key]!r:.40} as {key}" if timings.get(key) is not None else f"lack {key}"
    raise Failure(f"the server's timings {found}: {IS_IT}")


# ---- what else is in it
def note(topic, text, size=0.0):
    """Keep a remark about the figures: on each topic, the largest."""
    notes[topic] = max(notes.get(topic, (size, text)), (size, text))


def look_back(answer, chunks, behind=False):
    """After a whole answer, note what else is in its figures."""
    note_content(answer, chunks)
    note_clocks(answer, chunks, behind)
    note_neighbour()


def note_content(answer, chunks):
    """Note where an answer is not of the kind that was asked for."""
    if not answer.cache_prompt and number(answer.timings, "cache_n") is None:
        note("cache", "can't verify that the cache was off: the server reports no cache_n")
    before = chunks[0]["t_ms"] - answer.first_token_ms
    if before > 0:
        note("thoughts", f"reasoning came first: {before:.0f} ms of the first token's time", before)
    text = "".join(chunk["text"] for chunk in chunks)
    if text.lstrip().startswith("<think>") or "</think>" in text:
        note("<think>", f"the answer begins with reasoning (<think>), not speech: {NO_REASONING}")
    tokens = max(len(chunks), number(answer.timings, "predicted_n") or 0)
    if tokens > answer.max_tokens:
        ignored = f"the server ignored max_tokens: {tokens} tokens"
        note("length", f"{ignored} for {answer.max_tokens}", tokens)


def note_clocks(answer, chunks, behind=False):
    """Note what the server's clock does not explain; behind a hang-up, a wait is no news."""
    first, last = answer.first_token_ms, chunks[-1]["t_ms"]
    prompt_ms, predicted_ms = (number(answer.timings, key) for key in ("prompt_ms", "predicted_ms"))
    pairs, queue, buffers = [], "another request in front (a queue)", "a proxy that buffers"
    if prompt_ms is not None and not behind:
        pairs.append(("a first token took", first, prompt_ms, queue))
    if predicted_ms is not None:  # the last token may have no text, and [DONE] may be late
        took = min(max(predicted_ms, last - first), answer.total_ms - first)
        pairs.append(("an answer came in", took, predicted_ms, buffers))
    elif len(chunks) >= 8 and last - chunks[0]["t_ms"] <= 1:
        note("burst", f"all {len(chunks)} fragments came within 1 ms: {buffers}, or the network")
    for did, took, servers, cause in pairs:
        gap = abs(took - servers)
        if gap > max(50, 0.1 * took):
            times = f"{took:.0f} ms, but {servers:.0f} by the server's clock ({gap:.0f} ms apart)"
            note(did, f"{did} {times}: {cause}, the network, or a suspended process", gap)


def note_neighbour():
    """Note another slot at work."""
    for pause in 0, 0.02:  # a slot may still be winding up
        time.sleep(pause)
        states = slots()
        if len(states) == 1 or not any(state["is_processing"] for state in states):
            return
    shared = "another slot was busy when an answer ended, so its figure shared the machine"
    note("neighbour", f"{shared}: stop other requests")


# ---- the slots
def slots(required=False):
    """What /slots tells → [{"is_processing": bool, "id_task": int, not in old builds, …}, …].
    Where it does not (--no-slots, a proxy), [] and a note, once for all; Failure if `required`."""
    if "slots" in notes and not required:
        return []
    try:  # 10 s: b9093 answers only after somebody's prefill
        status, body = get("/slots", None if required else min(10, timeout()))
        states = parsed(body) if status == 200 else None
        with contextlib.suppress(TypeError, LookupError):
            if states and all(isinstance(state["is_processing"], bool) for state in states):
                return states
        why = refusal("/slots", f"answered {status}, not whether a slot is idle", body, status)
    except NoAnswer as failure:
        why = failure
    if required:
        raise Failure(f"this step needs /slots: {why}")
    note("slots", f"can't verify that the server was idle: {why}")
    return []


def wait_idle(required=False):
    """Wait until no slot is processing; Failure after VOICE_LLM_TIMEOUT."""
    begin, limit, told = clock(), timeout(), False
    while any(state["is_processing"] for state in slots(required)):
        waited = clock() - begin
        if waited > limit:
            busy = f"the slot is still busy after {limit:g} s"
            raise Failure(f"{busy}: stop the other request, or restart the server")
        if waited > 0.5 and not told:
            told = True
            say("the server's slot is busy: waiting until it is idle")
        # llama-server abandons a prompt whose caller has left after a second in which it answers
        # nobody, not even on /slots: asking more often keeps the prompt alive.
        time.sleep(0.003 if waited < 0.5 else min(1.5, max(limit - waited, 0.003)))


# ---- the server
def server_of(props):
    """What /props tells → {"model": path, "context": n_ctx, "slots", "build"}, if it does."""
    found = {}
    with contextlib.suppress(AttributeError):  # where it is not of llama-server's shape
        found["model"] = props.get("model_path")
        found["context"] = (props.get("default_generation_settings") or {}).get("n_ctx")
        found["slots"], found["build"] = props.get("total_slots"), props.get("build_info")
    return {key: value for key, value in found.items() if value}


def server_of_results():
    """The same of the props.json in the folder of the results."""
    with contextlib.suppress(Failure):
        return server_of(parsed(read_text(result_path("props.json"), "")))
    return {}


def check_same_server():
    """Raise Failure where the results in the folder are of another server."""
    old = server_of_results()
    with contextlib.suppress(NoAnswer):
        new = server_of(parsed(get("/props", min(10, timeout()))[1])) if old else {}
        for key, value in old.items():
            if value != new.get(key, value):
                here, there = f"{url_of('')} has {key} {new[key]}", f"results of {key} {value}"
                hint = "set another VOICE_LLM_OUT, or run all steps (run_all.sh)"
                raise Failure(f"{here}, but {result_path()} has {there}: {hint}")


def check_not_mixed(props):
    """Raise Failure where simulated and real results would meet."""
    old, new = server_of_results().get("model"), server_of(parsed(props)).get("model")
    there = any(name.endswith((".json", ".jsonl")) for name in os.listdir(result_path()))
    if there and (old == SIMULATED) != (new == SIMULATED):
        kind = "simulated results" if old == SIMULATED else "results that are not simulated"
        raise Failure(f"{result_path()} holds {kind}: set VOICE_LLM_OUT to another folder")


def wait_ready():
    """Wait until the model is loaded → [body of /health, of /props]. Raises Failure."""
    begin, limit = clock(), timeout()
    for attempt in itertools.count():
        try:
            status, body = get("/health", min(limit, 5))
            if status != 503 or b"loading" not in body.lower():
                break
            longest, why = limit, Failure(f"still loading its model after {limit:g} s: {LOG}")
        except Failure as failure:  # just started, it does not listen yet
            longest, why = min(limit, 4), failure
        if clock() - begin > longest:
            raise why
        if attempt == 0:
            say("the server is not ready yet: waiting")
        time.sleep(0.2)
    answers = [(path, *get(path)) for path in ("/health", "/props")]
    for path, status, body in answers:
        found = parsed(body)
        if status != 200 or not isinstance(found, dict) or "error" in found:
            raise Failure(refusal(path, f"answered {status}", body, status))
    return [body for *_, body in answers]


# ---- files and terminal
def result_path(name=""):
    """The path of the result `name`, or of their folder."""
    return os.path.join(setting("VOICE_LLM_OUT"), name)


def prepare(new_server=False):
    """Check settings, folder and server first."""
    check_settings()
    try:
        os.makedirs(result_path(), exist_ok=True)
        tempfile.TemporaryFile(dir=result_path()).close()
    except OSError as error:
        hint = "set VOICE_LLM_OUT to a folder of your own (the default is the Pod's)"
        raise Failure(f"can't write into {result_path()} ({reason(error)}): {hint}") from None
    if not new_server:
        check_same_server()


def save(files):
    """Write {path: content}, bytes or what becomes indented JSON. Nobody sees half of a file, and
    none is replaced before all are written. Raises Failure."""
    temporary = {path: f"{path}.{os.getpid()}.tmp" for path in files}
    try:
        for path, content in files.items():
            if not isinstance(content, bytes):
                content = to_json(content, indent=2) + b"\n"
            with open(temporary[path], "wb") as file:
                file.write(content)
        for path, name in temporary.items():
            os.replace(name, path)
    except OSError as error:
        why = f"can't write {path} ({reason(error)})"
        raise Failure(f"{why}: make room, or set VOICE_LLM_OUT") from None
    finally:
        for name in temporary.values():
            with contextlib.suppress(OSError):
                os.unlink(name)


def to_json(value, indent=None):
    """`value` as JSON in UTF-8, where half a surrogate pair is \\ud83d."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def printable(text):
    """`text` with what could steer a terminal, an escape or a line end, as \\x1b, \\n …"""
    with contextlib.suppress(UnicodeEncodeError):  # a path in an ASCII locale
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text, end="\n"):
    """Tell on stderr what is going on, if it can be told."""
    say.open = end != "\n"
    try:
        if sys.stderr:
            print(printable(text), end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def write_result(name, result, table, summary=()):
    """Save and print a step's `result`; on a terminal, progress has shown the table."""
    save({result_path(name): result})
    seen = all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))
    lines = [*summary, *(() if seen else table), f"wrote {printable(result_path(name))}"]
    print(*lines, sep="\n", flush=True)
    if os.path.exists(result_path("report.json")) and not os.environ.get("VOICE_LLM_RUN_ALL"):
        note("report", "report.json still has the earlier figures: run report.py")


def parser(doc):
    """The argparse parser of a script. `doc` is the script's manual."""
    lines = ["settings, from the environment:"]
    for name, (default, what) in SETTINGS.items():
        lines += [f"  {name:18} {what}", f"{'':20} default {default}"][: 1 + bool(default)]
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        description=doc, epilog="\n".join(lines), formatter_class=form, allow_abbrev=False
    )


def run(main):
    """Run a script's `main`, and print the notes. A Failure is one line on stderr and status 1;
    Ctrl-C and SIGTERM are 130 and 143."""

    def on_signals(handler):
        for signum in signal.SIGINT, signal.SIGTERM:
            signal.signal(signum, handler)

    def stop(signum, frame):
        on_signals(signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise SystemExit(128 + signum)

    script, status = os.path.basename(sys.argv[0]), 1
    try:
        on_signals(stop)
        if sys.stdout:
            sys.stdout.reconfigure(errors="backslashreplace")
        main()
        print(end="", flush=True)
        on_signals(signal.SIG_IGN)  # nor Python's own end
        for _, text in notes.values():
            say(f"note: {text}")
        return
    except Failure as failure:
        if getattr(say, "open", False):
            say("")
        say(f"{script}: {failure}"[:1000])
    except BrokenPipeError:
        pass  # `| head` has what it wants
    except OSError as error:  # of printing
        say(f"{script}: can't print the result ({reason(error)}): look at where stdout goes")
    except SystemExit as ending:
        status = ending.code
        if status in (0, 2):  # argparse's, for --help and a wrong option
            raise
    os._exit(status)  # Python's own end might wait for a stalled terminal


# ---- steps 1 and 2
def step_1():
    """Save what the server is."""
    prepare(new_server=True)
    health, props = wait_ready()
    check_not_mixed(props)
    save({result_path("health.json"): health, result_path("props.json"): props})
    print(f"ready: wrote {printable(result_path('health.json'))} and props.json beside it")


def step_2():
    """Ask one question, and save all that came."""
    import concurrent.futures  # here: it takes 10 ms

    messages = chat(system_prompt(SYSTEM), questions(QUESTION)[0])
    prepare()
    wait_idle()
    say(f"asking: {messages[1]['content']}")
    raw, chunks = io.BytesIO(), []
    screen = concurrent.futures.ThreadPoolExecutor(1)  # a stalled terminal stops no clock
    try:
        with Answer(messages, cache_prompt=False, raw_out=raw) as answer:
            for chunk in answer:
                chunks.append(chunk)
                screen.submit(print, printable(chunk["text"]), end="", flush=True)
    except Failure:
        concurrent.futures.wait([screen.submit(print, flush=True)])  # ends half a line
        raise
    look_back(answer, chunks)
    lines = b"".join(to_json(chunk) + b"\n" for chunk in chunks)
    files = {"sse_raw.txt": raw.getvalue(), "chunks.jsonl": lines, "request.json": answer.body}
    if not os.path.exists(result_path("sse.py")):
        with open(__file__, "rb") as file:
            files["sse.py"] = file.read()
    save({result_path(name): content for name, content in files.items()})
    screen.submit(print, flush=True).result()
    times = f"first token {chunks[0]['t_ms']:.1f} ms, whole answer {answer.total_ms:.1f} ms"
    print(f"{times}, {plural(len(chunks), 'fragment')}")
    print(f"wrote {', '.join(files)} into {printable(result_path())}")


def main():
    options = parser(__doc__)
    options.add_argument("--server", action="store_true", help="do step 1 instead")
    (step_1 if options.parse_args().server else step_2)()


if __name__ == "__main__":
    run(main)
