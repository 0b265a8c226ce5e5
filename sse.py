#!/usr/bin/env python3
"""Step 2: read a streaming answer by hand, line by line, and keep every line.

  python3 sse.py            asks one question, shows the answer, and writes
                            sse_raw.txt   every line just as it was received
                            chunks.jsonl  {"t_ms", "text"} for each fragment
  python3 sse.py --server   step 1: waits until the server is ready, writes
                            health.json   what /health answered
                            props.json    what /props answered

Every measure_*.py builds on this module. A figure is written only if it is
true, its experiment took place, and measuring did not disturb it.
"""

import argparse
import contextlib
import http.client
import io
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from urllib.parse import urlsplit

SYSTEM = "You are a clinic phone assistant. Answer in one short sentence."
QUESTION = "What should a new patient bring?"
SETTINGS = {  # name: (default, what it is)
    "VOICE_LLM_URL": ("http://127.0.0.1:8080", "the llama-server"),
    "VOICE_LLM_OUT": ("/root/voice/llm", "the folder of the results; made if missing"),
    "VOICE_LLM_KB": ("/opt/lab/fixtures/voice/kb", "the documents: *.md, UTF-8, sorted by name"),
    "VOICE_LLM_SYSTEM": ("", "a text file: your system prompt for steps 2 to 6"),
    "VOICE_LLM_QUESTION": ("", "your caller's question for steps 2 to 6"),
    "VOICE_LLM_TIMEOUT": ("120", "seconds: the longest wait for an answer or a slot"),
}
MAX_BYTES = (
    8 * 2**20
)  # bytes: llama-server never sends a longer line, and parsing one would delay the deadline
HTTP_ERRORS = (
    OSError,
    ValueError,
    OverflowError,
    http.client.HTTPException,
)  # what http.client raises on a bad answer
CHAT, DONE = "/v1/chat/completions", b"[DONE]"
clock = time.perf_counter
notes = {}  # what else is in a figure, {kind: (size, text)}: run() prints them


class Failure(Exception):
    """Why there is no figure. str() is a message for a person: what happened, and what to do."""


def plural(number, thing):
    """'1 token', '2 tokens'."""
    return f"{number} {thing}{'s' * (number != 1)}"


# ---------------------------------------------------------------------------- settings
def setting(name):
    """The setting `name` as text, from the environment; the default where that is unset or blank."""
    return os.environ[name] if os.environ.get(name, "").strip() else SETTINGS[name][0]


def timeout():
    """VOICE_LLM_TIMEOUT in seconds, a float. Raises Failure where it is not a sensible number."""
    with contextlib.suppress(ValueError):
        seconds = float(setting("VOICE_LLM_TIMEOUT"))
        if 0 < seconds <= 1e6:
            return seconds
    raise Failure(
        f"VOICE_LLM_TIMEOUT is {setting('VOICE_LLM_TIMEOUT')!r}: set it to a number of seconds up to 1000000"
    )


def address():
    """(host, port, path prefix) of VOICE_LLM_URL. Raises Failure where it is not an http:// URL."""
    text = setting("VOICE_LLM_URL")
    with contextlib.suppress(
        ValueError
    ):  # a port that is not a number, a bracket that never closes
        url = urlsplit(text)
        if (
            url.scheme == "http"
            and url.hostname
            and all("!" <= c <= "~" and c not in "@?#" for c in text)
        ):
            return url.hostname, 80 if url.port is None else url.port, url.path.rstrip("/")
    raise Failure(
        f"VOICE_LLM_URL is {text!r}: only http:// can be measured: set a plain http://127.0.0.1:8080, say"
    )


def url_of(path):
    """The URL of `path` on the server, for a message."""
    return setting("VOICE_LLM_URL").rstrip("/") + path


def read_text(path, what_to_do):
    """The text of a UTF-8 file, with or without a BOM, stripped. Raises Failure, with `what_to_do`."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait
        raise Failure(f"{path} is not a file: {what_to_do}")
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read().strip()
    except (OSError, ValueError) as error:
        why = (
            f"not UTF-8, byte {error.start}"
            if isinstance(error, UnicodeDecodeError)
            else error_words(error)
        )
        raise Failure(f"can't read {path} ({why}): {what_to_do}") from None


def system_prompt(default):
    """The text of the file VOICE_LLM_SYSTEM; `default` where that is unset. Raises Failure where it is blank."""
    path = setting("VOICE_LLM_SYSTEM")
    text = (
        read_text(path, "set VOICE_LLM_SYSTEM to a UTF-8 text file, or unset it")
        if path
        else default
    )
    if not text:
        raise Failure(
            f"{path} is blank: write your system prompt into it, or unset VOICE_LLM_SYSTEM"
        )
    return text


# ---------------------------------------------------------------------------- one request
ADVICE = (  # (HTTP statuses, or any; what the error says; what to do): the first row that fits
    (
        (),
        "context size",
        "shorten the prompt, or start llama-server with a larger -c, or -np 1 if slots share it",
    ),
    (
        (),
        "model name is missing",
        "this llama-server is a router without a model: start it with a model (-m)",
    ),
    ((301, 302, 303, 307, 308), "", "this is a redirect: set VOICE_LLM_URL to llama-server itself"),
    ((401, 403), "api key", "start llama-server without --api-key"),
    (
        (401, 403),
        "",
        "something in front of llama-server asks for a login: set VOICE_LLM_URL to llama-server itself",
    ),
    ((200, 404, 405), "", "is this a llama-server, and VOICE_LLM_URL its address without a path?"),
    (
        (413,),
        "",
        "a proxy refuses a prompt of this size: raise its limit, or set VOICE_LLM_URL to llama-server itself",
    ),
    (
        (429,),
        "",
        "a proxy limits the number of requests: wait, or set VOICE_LLM_URL to llama-server itself",
    ),
    ((501,), "slots", "start llama-server without --no-slots (old builds: with --slots)"),
    ((501,), "does not support", "restart llama-server as its message says"),
    ((503,), "loading", "wait until the model is loaded, and run this again"),
    (
        (502, 503, 504),
        "",
        "a proxy can't reach llama-server: start it, or set VOICE_LLM_URL to llama-server itself",
    ),
    ((), "", "look at the server's log"),
)


def refusal(path, what, data, status=None):
    """The message for what a server did ("answered 503", say): its error, `data` as bytes, and what to do."""
    text = data.decode("utf-8", "replace").lower().replace("_", " ")
    fits = (
        hint for codes, words, hint in ADVICE if (not codes or status in codes) and words in text
    )
    return f"{url_of(path)} {what}: {error_text(data)}: {next(fits)}"


def error_text(data):
    """What a server's error says (bytes: JSON of any usual shape, HTML or text), as short text."""
    text = data[:65536].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        if "<title>" in text:
            text = "a web page, " + text.partition("<title>")[2].partition("</title>")[0]
        return " ".join(text.split())[:300] or "nothing"
    for key in "error", "message", "detail", "text":
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(found))[:300] or "nothing"


def error_words(error):
    """What an exception says, without its type where it says anything."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def connect(seconds):
    """Open a connection → http.client.HTTPConnection with a socket timeout. Raises Failure where nothing listens."""
    host, port, _ = address()
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.connect()
    except (OSError, ValueError) as error:  # ValueError: a host name that DNS can't carry
        what = f"no server answers at {url_of('')} ({error_words(error)})"
        raise Failure(f"{what}: start it (voice-llm up), or set VOICE_LLM_URL") from None
    return connection


def get(path, seconds=None):
    """GET `path` → (HTTP status, body as bytes). Raises Failure where `seconds` (VOICE_LLM_TIMEOUT) bring no byte."""
    limit = timeout() if seconds is None else seconds
    with contextlib.closing(connect(limit)) as connection:
        try:
            connection.request("GET", address()[2] + path)
            with connection.getresponse() as response:
                return response.status, response.read(MAX_BYTES)
        except HTTP_ERRORS as error:
            late = isinstance(error, socket.timeout)
            what = f"no answer after {limit:g} s" if late else f"no answer ({error_words(error)})"
            hint = (
                "allow more with VOICE_LLM_TIMEOUT"
                if late and seconds is None
                else "restart the server"
            )
            raise Failure(f"{url_of(path)}: {what}: look at the server's log, or {hint}") from None


# ---------------------------------------------------------------------------- the event stream
def events(lines):
    """Yield (time, type, data as bytes) for each event in `lines`, pairs of (time, line as bytes).

    The rules are those of https://html.spec.whatwg.org/multipage/server-sent-events.html, and the time is that of
    the event's last data line. Four things differ: `[DONE]` ends the stream as soon as its line is here, without a
    blank line. An `error:` line or bare JSON, which servers write when they break down, is an event of type "error".
    An event of white space, a heartbeat, is dropped. A lone CR ends no line: a line reader can't see it in time.
    """
    kind, data, at, bom = b"message", [], None, b"\xef\xbb\xbf"
    for now, line in lines:
        line, bom = line.removeprefix(bom).rstrip(b"\r\n"), b""
        field, _, value = line.partition(b":")  # a comment is a field without a name
        value = value.removeprefix(b" ")
        if not line:
            if any(part.strip() for part in data):
                yield at, kind, b"\n".join(data)
            kind, data = b"message", []
        elif field == b"data":
            data.append(value)
            at = now
            if len(data) == 1 and value.strip() == DONE:
                yield at, kind, DONE
                return
        elif field == b"event":
            kind = value or b"message"
        elif field == b"error" or line[:1] == b"{":
            yield now, b"error", value if field == b"error" else line


# ---------------------------------------------------------------------------- one answer
class Answer:
    """A streaming answer of /v1/chat/completions. Use it in a `with`, which closes the connection.

    Iterating yields its fragments as they arrive: {"t_ms": float, "text": str}, one for each event with content; a
    role alone and a comment are none. All times are milliseconds since `start`, the clock() just before the request
    was sent on an open connection. Iteration ends after a whole answer (`[DONE]`, and before it a finish_reason of
    stop or length, or llama-server's final timings), after close(), or after `cut_after` seconds. Anything else
    raises Failure: a refusal, an error, an answer cut short or without content, a prompt out of a cache although
    `cache_prompt` is False. total_ms, closed_at_ms: the time of [DONE], of the close; None before. accepted_ms:
    of the headers with status 200, when llama-server begins with the prompt. first_token_ms: of the first event
    with content or reasoning. received: fragments so far. finish_reason: why the answer ended. timings: the server's
    own, {} where it sends none: prompt_n, prompt_ms, cache_n, predicted_n, predicted_ms (tools/server/README.md of
    llama.cpp). raw_out: a binary file that gets every line.
    """

    def __init__(self, messages, max_tokens=64, cache_prompt=True, raw_out=None, cut_after=None):
        body = {
            "messages": messages,
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 7,
        }
        body["cache_prompt"] = self.cache_prompt = cache_prompt
        self.raw_out, self.cut_after = raw_out, cut_after
        self.seconds = timeout() if cut_after is None else cut_after
        self.total_ms = self.accepted_ms = self.first_token_ms = self.closed_at_ms = (
            self.finish_reason
        ) = None
        self.timings, self.received, self._final_timings = {}, 0, False
        self._words = sum(len(str(message.get("content") or "").split()) for message in messages)
        self._response, self._why = None, ""  # why the connection ended, where http.client tells
        self._connection = connect(timeout())
        # Kept here: getresponse() takes the socket away from the connection if the server says
        # "Connection: close"; conn.close() would then leave it open, and the server would go on.
        self._socket = self._connection.sock
        self._socket.settimeout(self.seconds)  # for sending
        self.start = clock()
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", address()[2] + CHAT, json.dumps(body), headers)
        except HTTP_ERRORS as error:
            self._why = error_words(error)  # an early answer (413, say) may still be there
        # From here on, one deadline for all: a socket timeout starts again with every byte, and a
        # server that sends a comment now and then would never reach it.
        self._socket.settimeout(None)
        self._timer = threading.Timer(self.start + self.seconds - clock(), self.close)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._timer.cancel()
        self.close()
        if self._response:
            self._response.close()
        self._connection.close()

    def close(self):
        """Close the TCP connection now, whatever the server is doing; from any thread."""
        if self.closed_at_ms is None:
            self.closed_at_ms = self._ms(clock())  # first, since the reader wakes at once and asks
            with contextlib.suppress(OSError):
                self._socket.shutdown(
                    socket.SHUT_RDWR
                )  # close() would not wake a reader in another thread

    def _ms(self, at):
        return round((at - self.start) * 1000, 3)

    def __iter__(self):
        try:
            self._response = self._connection.getresponse()
        except HTTP_ERRORS as error:
            self._why = self._why or error_words(error)
        if self._response and self.closed_at_ms is None:  # a close may have cut the headers short
            self._check_headers()
            for at, kind, data in events(self._lines()):
                if data == DONE:
                    self.total_ms = self._ms(at)
                    break
                if text := self._content(at, kind, data):
                    self.received += 1
                    yield {"t_ms": self._ms(at), "text": text}
        self._check_whole()

    def _lines(self):
        """Yield (clock() at which readline returned it, line) until the connection ends or is closed."""
        while True:
            try:
                line = self._response.readline(MAX_BYTES)
            except HTTP_ERRORS as error:
                line, self._why = b"", error_words(error)
            now = clock()
            if len(line) == MAX_BYTES:
                line, self._why = b"", f"a line of more than {MAX_BYTES} bytes"
            if not line or (self.closed_at_ms is not None and self._ms(now) >= self.closed_at_ms):
                return  # what was still in the buffer was not received before the close
            if self.raw_out is not None:
                self.raw_out.write(line)
            yield now, line

    def _check_headers(self):
        status, headers, data = self._response.status, self._response.headers, b""
        kind, encoding = (
            headers.get("Content-Type", ""),
            headers.get("Content-Encoding") or "identity",
        )
        streams = not kind or kind.partition(";")[0].strip().lower() == "text/event-stream"
        if status != 200 or not streams:
            self._socket.settimeout(1)  # the first part will do: the rest may never come
            with contextlib.suppress(*HTTP_ERRORS):
                data = self._response.read1(65536)
            what = (
                f"answered {status}"
                if status != 200
                else f"answered with {kind}, not an event stream"
            )
            raise Failure(refusal(CHAT, what, data, status))
        if encoding.lower() != "identity":
            raise Failure(
                f"{url_of(CHAT)} answered in {encoding}, unasked: remove the proxy that compresses it"
            )
        self.accepted_ms = self._ms(clock())

    def _content(self, at, kind, data):
        """The content of one event, "" where it has none; what else it tells is kept. Raises Failure."""
        if kind not in (b"message", b"error") and b'"choices"' not in data:
            return ""  # an event of another type, a ping, say
        try:
            event = (
                {"error": True} if kind == b"error" else json.loads(data.decode("utf-8", "replace"))
            )
            choice = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            content = "" + (delta.get("content") or "")  # TypeError where it is not text
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            timings = event.get("timings")
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            wrong = (
                "JSON" if isinstance(error, (ValueError, RecursionError)) else "of the API's shape"
            )
            raise Failure(
                f"{url_of(CHAT)}: an event is not {wrong}: {error_text(data)}: is it llama-server?"
            ) from None
        chunk = "choices" in event or "timings" in event or "usage" in event
        if not chunk or event.get("error"):
            raise Failure(
                refusal(CHAT, f"reported an error after {plural(self.received, 'fragment')}", data)
            )
        if (content or reasoning) and self.first_token_ms is None:
            self.first_token_ms = self._ms(at)
        if (
            content or reasoning or isinstance(timings, dict)
        ):  # an option of llama-server puts timings on every event
            self._final_timings = not (content or reasoning)
            self.timings = timings if isinstance(timings, dict) else self.timings
        self.finish_reason = self.finish_reason or choice.get("finish_reason")
        return content

    def _check_whole(self):
        """Raise Failure where the answer is not a measurement, unless it was closed on purpose."""
        got, again = (
            plural(self.received, "fragment"),
            "look at the server's log, and run this again",
        )
        cached, computed = self.timings.get("cache_n"), self.timings.get("prompt_n")
        warm = (
            cached > 0 if is_number(cached) else is_number(computed) and computed < self._words / 2
        )
        if self.total_ms is None and self.closed_at_ms is not None:
            if self.cut_after is not None or self.closed_at_ms < self.seconds * 1000:
                return  # by its caller, not by the deadline
            what = f"{got} but no [DONE]" if self._response else "no answer"
            why = f"{what} after {self.seconds:g} s: look at the server's log, or allow more with VOICE_LLM_TIMEOUT"
        elif self.total_ms is None:
            what = (
                f"the connection ended after {got}, before [DONE]"
                if self._response
                else "no answer"
            )
            why = f"{what}{self._why and f' ({self._why})'}: {again}"
        elif self.finish_reason not in ("stop", "length") and (
            self.finish_reason or not self._final_timings
        ):
            reason = (
                f"finish_reason {self.finish_reason!r:.40}"
                if self.finish_reason
                else "no finish_reason"
            )
            why = f"the answer was cut short: [DONE] after {got} with {reason}: {again}"
        elif not self.received and self.first_token_ms is not None:
            why = "the answer has only reasoning and no content: start llama-server with --reasoning-budget 0"
        elif not self.received:
            why = "the answer has no content: is it a chat model?"
        elif not self.cache_prompt and warm:
            what = (
                f"{plural(computed, 'token')} computed of a prompt of {self._words} words: the rest"
            )
            what = f"{plural(cached, 'token')} of the prompt" if cached else what
            why = f"{what} came from a cache, though cache_prompt is false: set VOICE_LLM_URL to llama-server itself"
        else:
            return
        raise Failure(f"{url_of(CHAT)}: {why}")


def stream(messages, max_tokens=64, cache_prompt=True, raw_out=None):
    """Send `messages` and read the answer → (chunks, total_ms, timings); chunks: [{"t_ms": float, "text": str}, …],
    the rest and what raises Failure: see Answer. raw_out: a path, written at the end, or an open file."""
    path = raw_out if isinstance(raw_out, (str, os.PathLike)) else None
    file = (
        io.BytesIO() if path else getattr(raw_out, "buffer", raw_out)
    )  # of a text file, its bytes
    with Answer(messages, max_tokens, cache_prompt, file) as answer:
        chunks = list(answer)
    if path:
        save({path: file.getvalue()})
    note_what_else(answer, chunks)
    return chunks, answer.total_ms, answer.timings


def chat(system, question):
    """The messages of one question under one system prompt."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def is_number(value):
    """Whether `value` is a number from 0 up. NaN and Infinity, which JSON readers let in, are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15


def required_timing(timings, key):
    """The number `key` of a server's timings; a count, *_n, is whole. Raises Failure where it is not."""
    value, kind = timings.get(key), "whole number" if key.endswith("_n") else "number"
    if is_number(value) and (kind == "number" or value == int(value)):
        return value
    what = (
        f"lack {key}" if value is None else f"have {value!r:.40} as {key}, not a {kind} from 0 up"
    )
    raise Failure(f"the server's timings {what}: is {url_of('')} a llama-server?")


def note(kind, text, size=0.0):
    """Keep a remark about the figures: of each kind, the largest."""
    notes[kind] = max(notes.get(kind, (size, text)), (size, text))


def note_what_else(answer, chunks):
    """After a whole answer, note what else is in its figures: the server's own clock and its other slots tell."""
    first, last = answer.first_token_ms, chunks[-1]["t_ms"]
    prompt_ms, predicted_ms = answer.timings.get("prompt_ms"), answer.timings.get("predicted_ms")
    if not answer.cache_prompt and not is_number(answer.timings.get("cache_n")):
        note(
            "untold",
            "nobody knows whether the cache was off: the server does not tell what came from it (cache_n)",
        )
    gap = abs(first - prompt_ms) if is_number(prompt_ms) else 0
    if gap > max(50, 0.1 * first):
        what = f"a first token took {first:.0f} ms, but {prompt_ms:.0f} by the server's clock ({gap:.0f} ms apart)"
        note(
            "first",
            f"{what}: another request in front (a queue), the network, or a suspended process",
            gap,
        )
    causes = "a proxy that buffers, the network, or a suspended process"
    if is_number(
        predicted_ms
    ):  # the last token may have no text, and [DONE] may be late: between the two is right
        took = sorted((last - first, predicted_ms, answer.total_ms - first))[1]
        gap = abs(took - predicted_ms)
        if gap > max(50, 0.1 * took):
            what = f"an answer came in {took:.0f} ms, but {predicted_ms:.0f} by the server's clock ({gap:.0f} ms apart)"
            note("answer", f"{what}: {causes}", gap)
    elif len(chunks) >= 8 and last - chunks[0]["t_ms"] <= 1:
        note("answer", f"all {len(chunks)} fragments came within 1 ms: {causes}")
    if (reasoning := chunks[0]["t_ms"] - first) > 0:
        note(
            "reasoning",
            f"reasoning came first: {reasoning:.0f} ms of the first token's time",
            reasoning,
        )
    for pause in 0, 0.02:  # a slot may still be winding up
        time.sleep(pause)
        states = slots()
        if len(states) == 1 or not any(state["is_processing"] for state in states):
            return
    note(
        "shared",
        "another slot was busy when an answer ended, so its figure shared the machine: stop other requests",
    )


# ---------------------------------------------------------------------------- the slots
def slots(required=False):
    """What /slots tells → [{"is_processing": bool, "id_task": int (not in old builds), …}, …].
    Where it does not tell (--no-slots): [], with a note, or Failure if it is `required`."""
    status, body = get("/slots")
    with contextlib.suppress(ValueError, RecursionError, TypeError, LookupError):
        states = json.loads(body)
        if (
            status == 200
            and states
            and all(isinstance(state["is_processing"], bool) for state in states)
        ):
            return states
    why = refusal("/slots", f"answered {status}, not whether a slot is idle", body, status)
    if required:
        raise Failure(why)
    note("slots", f"nobody knows whether the server was idle, since {why}")
    return []


def wait_idle(required=False):
    """Wait until no slot is processing, or raise Failure after VOICE_LLM_TIMEOUT. `required`: see slots()."""
    begin, limit, told = clock(), timeout(), False
    while any(state["is_processing"] for state in slots(required)):
        waited = clock() - begin
        if waited > limit:
            raise Failure(
                f"the slot is still busy after {limit:g} s: stop the other request, or restart the server"
            )
        if waited > 0.5 and not told:
            told = True
            say("the server's slot is busy: waiting until it is idle")
        # llama-server abandons a prompt whose caller has left only after a second in which it answers
        # nobody, and an answer to /slots counts: whoever asks more often keeps the prompt alive.
        time.sleep(0.003 if waited < 0.5 else min(1.5, max(limit - waited, 0.003)))


def identity(props):
    """What `props`, the content of /props, tells of a server, as text in the order to be shown →
    {"model": …, "context": "context 4096", "slots": "slots 1", "build": "build b11434"}; each only
    where it tells."""
    settings = props.get("default_generation_settings")
    model, alias = (
        os.path.basename(str(props.get(key) or "")) for key in ("model_path", "model_alias")
    )
    kind = model.partition(":")[0]  # "simulated", which the fake server says in every key
    if model and alias not in ("", model, kind):
        model += f" ({alias})"
    found = {
        "context": settings.get("n_ctx") if isinstance(settings, dict) else None,
        "slots": props.get("total_slots"),
        "build": props.get("build_info"),
    }
    told = {key: f"{key} {value}" for key, value in found.items() if value and value != kind}
    return {"model": model or alias, **told} if model or alias else told


# ---------------------------------------------------------------------------- files and terminal
def result_path(name=""):
    """The path of `name` in the folder of the results."""
    return os.path.join(setting("VOICE_LLM_OUT"), name)


def make_out():
    """Make the folder of the results: better to fail before the measurement than after it."""
    try:
        os.makedirs(result_path(), exist_ok=True)
        tempfile.TemporaryFile(dir=result_path()).close()
    except OSError as error:
        raise Failure(
            f"can't write into {result_path()} ({error_words(error)}): set another VOICE_LLM_OUT"
        ) from None


def save(files):
    """Write `files`, {path: content}: bytes, or what becomes indented JSON. Nobody ever sees half of a file, and
    where one can't be written all are as they were. Raises Failure."""
    temporary = {path: f"{path}.{os.getpid()}.tmp" for path in files}
    try:
        for path, content in files.items():
            if os.path.isdir(path):
                raise IsADirectoryError("is a directory")
            with open(temporary[path], "wb") as file:
                file.write(
                    content if isinstance(content, bytes) else to_json(content, indent=2) + b"\n"
                )
        for path, name in temporary.items():
            os.replace(name, path)
    except OSError as error:
        raise Failure(
            f"can't write {path} ({error_words(error)}): make room for it, or set VOICE_LLM_OUT"
        ) from None
    finally:
        for name in temporary.values():
            with contextlib.suppress(OSError):
                os.unlink(name)


def to_json(value, indent=None):
    """`value` as JSON in UTF-8. Half a surrogate pair, which UTF-8 can't hold, is written as \\ud83d."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )


def printable(text):
    """`text` with everything that could steer a terminal (escapes, line ends, bidi marks) as \\x1b, \\n …"""
    with contextlib.suppress(
        UnicodeEncodeError
    ):  # a path as Python holds it where the locale is ASCII
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text, end="\n"):
    """Tell on stderr what is going on, whether or not somebody can read it. With another `end`, the line stays open."""
    say.open = end != "\n"
    try:
        if sys.stderr:
            print(printable(text), end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def write_result(name, result, table, summary=()):
    """Save a step's `result`. Print `summary` and `table`, but no table on a terminal, where progress has shown it."""
    save({result_path(name): result})
    seen = all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))
    print(
        *summary,
        *(() if seen else table),
        f"wrote {printable(result_path(name))}",
        sep="\n",
        flush=True,
    )
    if os.path.exists(result_path("report.json")) and not os.environ.get("VOICE_LLM_RUN_ALL"):
        note("report", "report.json still has the earlier figures: run report.py")


def parser(doc):
    """The argparse parser of a script. `doc` is the script's manual."""
    lines = ["settings, from the environment:"]
    for name, (default, what) in SETTINGS.items():
        lines += [f"  {name:18} {what}", f"{'':20} default {default or 'as in the lab'}"]
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        description=doc, epilog="\n".join(lines), formatter_class=form, allow_abbrev=False
    )


def run(main):
    """Run a script's `main`: a Failure is one line on stderr and status 1; Ctrl-C and SIGTERM exit with 130 and 143."""
    stopping = []  # a second Ctrl-C must not interrupt the cleaning up

    def stop(signum, frame):
        if not stopping:
            stopping.append(signum)
            sys.exit(128 + signum)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    script = os.path.basename(sys.argv[0])
    try:
        if sys.stdout:
            sys.stdout.reconfigure(errors="backslashreplace")
        main()
        print(end="", flush=True)
        for _, text in notes.values():
            say(f"note: {text}")
        return
    except Failure as failure:
        if getattr(say, "open", False):
            say("")
        say(f"{script}: {failure}"[:1000])
    except OSError as error:  # only printing is left to raise this
        if not isinstance(error, BrokenPipeError):  # `| head` has what it wants
            say(
                f"{script}: can't print the result ({error_words(error)}): look at where stdout goes"
            )
    finally:  # a signal must not break into Python's own end either
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        if stopping:
            os._exit(128 + stopping[0])  # Python's end would wait for a terminal that stalls
    os._exit(1)  # nor try again to print what could not be printed


# ---------------------------------------------------------------------------- steps 1 and 2
def wait_ready():
    """Wait until the server has loaded its model → [body of /health, body of /props], bytes. Raises Failure."""
    address()  # one that is not a URL does not get better by waiting
    begin, limit = clock(), timeout()
    for attempt in itertools.count():
        try:
            status, body = get("/health", min(limit, 5))
            if status != 503 or b"loading" not in body.lower():
                break
            longest, why = (
                limit,
                Failure(
                    f"the server is still loading its model after {limit:g} s: look at its log"
                ),
            )
        except Failure as failure:  # one that was just started does not listen yet
            longest, why = min(limit, 4), failure
        if clock() - begin > longest:
            raise why
        if attempt == 0:
            say("the server is not ready yet: waiting")
        time.sleep(0.2)
    answers = {path: get(path) for path in ("/health", "/props")}
    for path, (status, body) in answers.items():
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(body)
            if status == 200 and isinstance(found, dict) and "error" not in found:
                continue
        raise Failure(refusal(path, f"answered {status}", body, status))
    return [body for _, body in answers.values()]


def main():
    options = parser(__doc__)
    options.add_argument("--server", action="store_true", help="do step 1 instead")
    if options.parse_args().server:
        make_out()
        save(dict(zip((result_path("health.json"), result_path("props.json")), wait_ready())))
        print(
            f"ready: wrote {printable(result_path('health.json'))} and {printable(result_path('props.json'))}"
        )
        return
    import concurrent.futures  # here, since only this step needs it and every other would start 10 ms later

    messages = chat(system_prompt(SYSTEM), setting("VOICE_LLM_QUESTION") or QUESTION)
    make_out()
    wait_idle()
    say(f"asking: {messages[1]['content']}")
    raw, chunks = io.BytesIO(), []
    screen = concurrent.futures.ThreadPoolExecutor(
        1
    )  # in a thread, a stalled terminal stops no clock
    try:
        with Answer(messages, cache_prompt=False, raw_out=raw) as answer:
            for chunk in answer:
                chunks.append(chunk)
                screen.submit(print, printable(chunk["text"]), end="", flush=True)
    except Failure:
        screen.submit(print, flush=True).result()  # ends the line of half an answer
        raise
    screen.submit(print, flush=True).result()
    note_what_else(answer, chunks)
    lines = b"".join(to_json(chunk) + b"\n" for chunk in chunks)
    save({result_path("sse_raw.txt"): raw.getvalue(), result_path("chunks.jsonl"): lines})
    first_ms, fragments = chunks[0]["t_ms"], plural(len(chunks), "fragment")
    print(f"first token {first_ms:.1f} ms, whole answer {answer.total_ms:.1f} ms, {fragments}")
    print(
        f"wrote {printable(result_path('sse_raw.txt'))} and {printable(result_path('chunks.jsonl'))}"
    )


if __name__ == "__main__":
    run(main)
