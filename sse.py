#!/usr/bin/env python3
"""Step 2: read a streaming answer by hand, line by line, and keep every line.

  python3 sse.py            asks one question, shows the answer as it arrives, and writes
                            sse_raw.txt   every line just as it was received
                            chunks.jsonl  one {"t_ms", "text"} a line: the fragments of the answer
  python3 sse.py --server   step 1: waits until the server is ready, and writes
                            health.json   what /health answered
                            props.json    what /props answered (model, context, slots)

As a module this file is what every measure_*.py stands on: the clock, the socket, the rules of
the event stream (https://html.spec.whatwg.org/multipage/server-sent-events.html) and the edge
where a failure becomes one line on stderr. It knows nothing of what is being measured.
"""

import argparse
import contextlib
import http.client
import io
import json
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

SYSTEM = "You are a clinic phone assistant. Answer in one short sentence."
QUESTION = "What should a new patient bring?"

SETTINGS = {
    "VOICE_LLM_URL": ("http://127.0.0.1:8080", "the llama-server"),
    "VOICE_LLM_OUT": ("/root/voice/llm", "the folder of the results; made if missing"),
    "VOICE_LLM_KB": ("/opt/lab/fixtures/voice/kb", "the documents: *.md, UTF-8, in the order of their names"),
    "VOICE_LLM_TIMEOUT": ("120", "seconds: the longest wait for one answer, and for an idle slot"),
}
LONGEST = 8 * 2**20  # bytes: a longer line or body is no llama-server's, and parsing it would hold up the watchdog
BROKEN = (OSError, ValueError, OverflowError, http.client.HTTPException)  # what http.client raises on a bad answer
DONE = b"[DONE]"
clock = time.perf_counter


class Failure(Exception):
    """Why there is no figure. str() is a message for a person: what happened, where, what to do."""


# ---------------------------------------------------------------------------- settings


def setting(name):
    """The setting `name` as text: the environment's, or the Pod's where that is unset or empty."""
    return os.environ.get(name) or SETTINGS[name][0]


def timeout():
    """VOICE_LLM_TIMEOUT in seconds, a float. Raises Failure where it is no sensible number."""
    text = setting("VOICE_LLM_TIMEOUT")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 1e6:
        raise Failure(f"VOICE_LLM_TIMEOUT is {text!r}: set it to a number of seconds, above 0 and up to 1000000")
    return seconds


def address():
    """(host, port, path prefix) of VOICE_LLM_URL. Raises Failure where it is not an http:// URL."""
    text = setting("VOICE_LLM_URL")
    try:
        url = urlsplit(text)
        plain = all("!" <= c <= "~" and c not in "@?#" for c in text)
        if url.scheme == "http" and url.hostname and plain:
            return url.hostname, 80 if url.port is None else url.port, url.path.rstrip("/")
    except ValueError:  # a port that is no number, a bracket that never closes
        pass
    raise Failure(f"VOICE_LLM_URL is {text!r}: set it to a URL such as {SETTINGS['VOICE_LLM_URL'][0]}")


# ---------------------------------------------------------------------------- one request


class Request:
    """One HTTP request on a connection of its own, with one clock and one watchdog.

    The watchdog closes the connection `seconds` after the request was sent (unless told, after
    VOICE_LLM_TIMEOUT). It is the only deadline: a socket timeout starts anew with every byte, so
    that a server which sends a comment now and then would never meet it. `cut` says that this
    end is wanted, and not a failure.

    The clock, ms(), starts just before the request is sent, on a connection that stands already.
    closed_at_ms is the moment of the close on that clock, None while the connection is open.
    Use it in a `with`. Raises Failure where nothing listens.
    """

    def __init__(self, method, path, body=None, seconds=None, cut=False):
        host, port, prefix = address()
        self.where = f"{setting('VOICE_LLM_URL').rstrip('/')}{path}"
        self.seconds = timeout() if seconds is None else seconds
        self.cut = cut
        self.closed_at_ms = None
        self.timed_out = False
        self._error = "the connection ended"
        self._response = None
        patience = timeout() if cut else self.seconds
        self._connection = http.client.HTTPConnection(host, port, timeout=patience)
        try:
            self._connection.connect()
        except (OSError, ValueError) as error:  # ValueError: a host name that DNS can't carry
            raise Failure(
                f"no server answers at {setting('VOICE_LLM_URL')} ({getattr(error, 'strerror', None) or error}): "
                "start it (voice-llm up), or set VOICE_LLM_URL"
            ) from None
        # Kept here, because getresponse() takes the socket away from the connection where the
        # server says "Connection: close"; conn.close() would then leave it open, and the server
        # would go on generating.
        self._socket = self._connection.sock
        self._socket.settimeout(None)
        self._over = threading.Event()
        self.start = clock()  # for the watchdog; what starting it costs is not the server's time
        threading.Thread(target=self._watch, daemon=True).start()
        headers = {"Content-Type": "application/json"} if body else {}
        self.start = clock()
        try:
            self._connection.request(method, prefix + path, body, headers)
        except BROKEN as error:
            self._error = repr(error)  # an early answer (413, say) may still be there to be read

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._over.set()
        self.close()
        if self._response:
            self._response.close()
        self._connection.close()

    def ms(self):
        """Milliseconds since just before the request was sent."""
        return (clock() - self.start) * 1000

    def close(self):
        """Close the TCP connection at this moment, whatever the server is doing; from any thread.

        shutdown() and not close(): it reaches the server at once and wakes a reader that is
        blocked in another thread, which close() does not.
        """
        if self.closed_at_ms is None:
            self.closed_at_ms = self.ms()  # first, since the reader wakes at once and asks why
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end was faster

    def _watch(self):
        while self.ms() < self.seconds * 1000:
            if self._over.wait(self.seconds - self.ms() / 1000):
                return
        self.timed_out = not self.cut
        self.close()

    def receive(self):
        """Wait for the headers → the http.client response, None where the connection ended before."""
        try:
            self._response = self._connection.getresponse()
        except BROKEN as error:
            self._error = repr(error)
        return self._response

    def body(self):
        """All the bytes of the response's body that came before the connection ended."""
        try:
            return self._response.read(LONGEST)
        except http.client.IncompleteRead as error:
            return error.partial
        except BROKEN:
            return b""

    def lines(self, copy_to=None):
        """Yield (time, line) for each line of the body: the clock() at which readline returned it, and its bytes.

        `copy_to`: a binary file that gets every line.
        """
        readline = self._response.readline
        while True:
            try:
                line = readline(LONGEST)
            except BROKEN as error:
                line, self._error = b"", repr(error)
            now = clock()
            if len(line) == LONGEST:
                line, self._error = b"", f"a line of more than {LONGEST} bytes"
            if not line or (self.closed_at_ms is not None and (now - self.start) * 1000 >= self.closed_at_ms):
                return  # what still lay in the buffer was not received before the close
            if copy_to is not None:
                copy_to.write(line)
            yield now, line

    def lost(self, got="no answer"):
        """The Failure for a connection that ended too early. `got`: what had come by then."""
        if self.timed_out:
            return Failure(
                f"{self.where}: {got} after {self.seconds:g} s: look at the server's log, "
                "or allow more with VOICE_LLM_TIMEOUT"
            )
        return Failure(f"{self.where}: {got}, and then {self._error}: look at the server's log, and run this again")


def get(path, seconds=None):
    """GET `path` from the server → (HTTP status, body as bytes). Raises Failure where no answer comes."""
    with Request("GET", path, seconds=seconds) as request:
        response = request.receive()
        if not response:
            raise request.lost()
        body = request.body()
        if request.timed_out:
            raise request.lost("no whole answer")
        return response.status, body


# ---------------------------------------------------------------------------- one answer


def events(lines):
    """Yield (time, type, data as bytes) for each event in `lines`, pairs of (time, line as bytes).

    The rules are those of the HTML standard's event streams, and the time is that of the event's
    last data line. Two things differ from the standard. `[DONE]` ends an answer as soon as its
    line is here, since no blank line need follow. And what servers write into a stream when they
    break down, an `error:` line or bare JSON, comes out as an event of type "error"; the standard
    would have it ignored.
    """
    kind, data, at, bom = b"message", [], None, b"\xef\xbb\xbf"
    for now, line in lines:
        if bom:
            line, bom = line[3:] if line.startswith(bom) else line, b""
        line = line.rstrip(b"\r\n")
        if not line:
            if any(part.strip() for part in data):
                yield at, kind, b"\n".join(data)
            kind, data = b"message", []
            continue
        field, _, value = line.partition(b":")  # a comment is a field without a name
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            data.append(value)
            at = now
            if value[:6] == DONE and len(data) == 1:
                yield at, kind, value
        elif field == b"event":
            kind = value
        elif field == b"error" or line[:1] == b"{":
            yield now, b"error", value if field == b"error" else line


def words(data):
    """What a server's error says (bytes: JSON in any of the usual shapes, HTML, text), as short text."""
    text = data[:65536].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        if "<title>" in text:
            text = "a web page, " + text.partition("<title>")[2].partition("</title>")[0]
        return " ".join(text.split())[:300] or "nothing"
    for key in "error", "message", "detail":
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(found))[:300] or "nothing"


HINTS = {  # what to do about an HTTP status
    400: "shorten the prompt, or start llama-server with a larger context (-c)",
    401: "start llama-server without --api-key",
    404: "is this a llama-server, and VOICE_LLM_URL its address without a path?",
    503: "wait until the model is loaded, and run this again",
}


class Answer(Request):
    """A streaming answer of /v1/chat/completions. Iterating yields its fragments as they arrive:
    {"t_ms": milliseconds since just before the request was sent, "text": str}, one for each event
    with content; an event with only a role, and a comment, is none.

    Iteration ends after `[DONE]` (then total_ms is its time, and timings the last `timings` object
    the server sent, {} where it sent none: prompt_n, prompt_ms, cache_n, predicted_n …), or early
    where close() was called or `cut_after` seconds have passed (then total_ms stays None). Anything
    else raises Failure: a refusal, an error in the stream, an answer cut off, or one without content.
    `ended` says that the model had finished, even where `[DONE]` had not come yet.
    `raw_out`: a binary file that gets every line as it came.

    What llama-server sends: tools/server/README.md of https://github.com/ggml-org/llama.cpp.
    """

    def __init__(self, messages, max_tokens=64, cache_prompt=True, raw_out=None, cut_after=None):
        body = {
            "messages": messages,
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 7,
            "cache_prompt": cache_prompt,
        }
        self.raw_out = raw_out
        self.total_ms = None
        self.timings = {}
        self.ended = False
        self.count = 0
        self._reasoned = False
        super().__init__("POST", "/v1/chat/completions", json.dumps(body), cut_after, cut_after is not None)

    def __iter__(self):
        if self.receive() and self.closed_at_ms is None:  # a close may have cut the headers short
            self._check_headers()
            for at, kind, data in events(self.lines(self.raw_out)):
                t_ms = round((at - self.start) * 1000, 3)
                if data.strip() == DONE:
                    self.total_ms = t_ms
                    self.ended = True
                    break
                text = self._content(kind, data)
                if text:
                    self.count += 1
                    yield {"t_ms": t_ms, "text": text}
        if self.total_ms is not None and not self.count:
            why = (
                "only reasoning: start llama-server with --reasoning-budget 0"
                if self._reasoned
                else "is it a chat model?"
            )
            raise Failure(f"{self.where}: the answer has no content: {why}")
        if self.total_ms is None and (self.timed_out or self.closed_at_ms is None):
            raise self.lost(f"{self.count} fragments but no [DONE]" if self._response else "no answer")

    def _check_headers(self):
        status, headers = self._response.status, self._response.headers
        kind, packed = headers.get("Content-Type", ""), headers.get("Content-Encoding", "identity")
        if status != 200:
            hint = HINTS.get(status, "look at the server's log")
            raise Failure(f"{self.where} answered {status}: {words(self.body())}: {hint}")
        if kind and kind.partition(";")[0].strip().lower() != "text/event-stream":
            what = f"{kind} and not an event stream: {words(self.body())}"
            raise Failure(f"{self.where} answered with {what}: is this a llama-server?")
        if packed != "identity":
            raise Failure(f"{self.where} answered in {packed}, unasked: take away the proxy that packs it")

    def _content(self, kind, data):
        """The text of one event, "" where it has none; notes timings and the model's end on the way."""
        try:
            event = {"error": True} if kind == b"error" else json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            raise Failure(f"{self.where}: an event is not JSON: {words(data)}: is this a llama-server?") from None
        try:
            if event.get("error") or event.get("object") == "error":
                raise Failure(
                    f"{self.where}: the server reported an error after {self.count} fragments: {words(data)}: "
                    "look at the server's log"
                )
            timings = event.get("timings")
            if isinstance(timings, dict):
                self.timings = timings
            choice = (event.get("choices") or [{}])[0]
            if choice.get("finish_reason"):
                self.ended = True
                if choice["finish_reason"] in ("error", "abort"):  # other servers' ways to say that they gave up
                    raise Failure(f"{self.where}: the server gave the answer up: run this again")
            delta = choice.get("delta") or {}
            text = delta.get("content")
            if not text:
                self._reasoned = self._reasoned or bool(delta.get("reasoning_content") or delta.get("reasoning"))
                return ""
            if not isinstance(text, str):
                raise TypeError
            return text
        except (AttributeError, LookupError, TypeError):
            raise Failure(f"{self.where}: an event is not of the API's shape: {words(data)}") from None


def stream(messages, max_tokens=64, cache_prompt=True, raw_out=None):
    """Send `messages` to /v1/chat/completions and read the whole answer → (chunks, total_ms, timings).

    chunks: [{"t_ms": float, "text": str}, …], one for each event with content. Times are in
    milliseconds since just before the request was sent; total_ms is the time of `[DONE]`.
    timings: the server's own figures, see Answer. raw_out: a path, written when the answer is
    whole, or a binary file, written as the lines come. Raises Failure for anything but a whole answer.
    """
    raw = raw_out if raw_out is None or hasattr(raw_out, "write") else io.BytesIO()
    with Answer(messages, max_tokens, cache_prompt, raw) as answer:
        chunks = list(answer)
    if raw is not raw_out:
        save({raw_out: raw.getvalue()})
    return chunks, answer.total_ms, answer.timings


def chat(system, question):
    """The messages of one question under one system prompt."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def number(value, what):
    """`value`, if it is a number from 0 up. Raises Failure, naming it as `what`, for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15:
        return value  # NaN and Infinity, which JSON readers let in, fail the comparison
    raise Failure(
        f"{what} is " + ("missing or null" if value is None else f"{value!r:.40}, and not a number from 0 up")
    )


def timing(timings, key):
    """The number `key` of a server's timings; a count, *_n, is whole. Raises Failure where it is no such number."""
    what = f"{setting('VOICE_LLM_URL')}: is this a llama-server? {key} in its timings"
    value = number(timings.get(key), what)
    if key.endswith("_n") and value != int(value):
        raise Failure(f"{what} is {value}, and not a whole number")
    return value


# ---------------------------------------------------------------------------- the slot


class SlotsUnknown(Failure):
    """The server does not tell whether its slots are idle."""


def slot_busy(seconds=None):
    """Whether a slot of the server is processing a request, as /slots tells. Raises SlotsUnknown where it does not."""
    status, body = get("/slots", seconds)
    try:
        states = [slot["is_processing"] for slot in json.loads(body)] if status == 200 else []
    except (ValueError, RecursionError, TypeError, LookupError):
        states = []
    if not states or not all(isinstance(state, bool) for state in states):
        what = f"{setting('VOICE_LLM_URL')}/slots answered {status}: {words(body)}, and not whether a slot is idle"
        raise SlotsUnknown(f"{what}: start llama-server without --no-slots (old builds: with --slots)")
    return any(states)


def wait_idle(required=False, steady=0.0):
    """Wait until no slot of the server is processing, and none is for `steady` seconds more: someone
    else's request must not count as ours → the clock() at which they were first seen idle.

    Where the server does not tell (--no-slots), returns at once or, with `required`, raises SlotsUnknown.
    Raises Failure where the slot is still busy after VOICE_LLM_TIMEOUT.
    """
    begin, limit, said, idle_since = clock(), timeout(), False, None
    while True:
        try:
            busy = slot_busy(max(limit - (clock() - begin), 0.5))
        except SlotsUnknown:
            if required:
                raise
            return clock()
        now = clock()
        if busy:
            idle_since = None
        elif idle_since is None:
            idle_since = now
        if idle_since is not None and now - idle_since >= steady:
            return idle_since
        waited = now - begin
        if busy and waited > limit:
            raise Failure(f"the slot is still busy after {limit:g} s: stop the other request, or restart the server")
        if busy and waited > 0.5 and not said:
            said = True
            say("the server's slot is busy: waiting until it is idle")
        time.sleep(0.003)


# ---------------------------------------------------------------------------- files, terminal, edge


def out(name=""):
    """The path of `name` in the folder of the results."""
    return os.path.join(setting("VOICE_LLM_OUT"), name)


def make_out():
    """Make the folder of the results: better to fail before the measurement than after it."""
    try:
        os.makedirs(out(), exist_ok=True)
        if os.access(out(), os.W_OK | os.X_OK):
            return
        error = "permission denied"
    except OSError as reason:
        error = reason.strerror
    raise Failure(f"can't write into the folder {out()} ({error}): set VOICE_LLM_OUT to another one")


_writing = threading.Lock()  # held while files are written: a signal waits until all are, or none is
_stopped = []  # the signal that waits


def save(files):
    """Write `files`, {path: content}, all or none; nobody ever sees half of one.

    Content is bytes, or what becomes indented JSON. Raises Failure where it can't be written.
    """
    temporary = {}
    with _writing:
        try:
            for path, content in files.items():
                if not isinstance(content, bytes):
                    content = to_json(content, indent=2) + b"\n"
                if os.path.isdir(path):
                    raise IsADirectoryError(None, "is a directory", path)
                with open(f"{path}.{os.getpid()}.tmp", "xb") as file:
                    temporary[path] = file.name
                    file.write(content)
            for path in files:
                os.replace(temporary[path], path)
                del temporary[path]
        except OSError as error:
            what = f"can't write {path} ({error.strerror})"
            raise Failure(f"{what}: make room and make it writable, or set VOICE_LLM_OUT") from None
        finally:
            for name in temporary.values():
                with contextlib.suppress(OSError):
                    os.unlink(name)
    if _stopped:
        sys.exit(128 + _stopped[0])


@contextlib.contextmanager
def reading(path, what_to_do):
    """Turn what goes wrong while `path` is read as UTF-8 into a Failure that names it."""
    try:
        yield
    except OSError as error:
        raise Failure(f"can't read {path} ({error.strerror}): {what_to_do}") from None
    except UnicodeDecodeError as error:
        raise Failure(f"{path} is not UTF-8 (byte {error.start}): {what_to_do}") from None


def to_json(value, indent=None):
    """`value` as UTF-8 JSON. Half a surrogate pair, which UTF-8 can't hold, stays the escape that it came as."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def visible(text):
    """`text` with everything that could steer a terminal (escapes, line ends, bidi marks) as \\x1b, \\n …"""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text):
    """Tell on stderr what is going on. Where that is full or gone, the measurement goes on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def command_line(doc, argv=None, **flags):
    """Parse a script's options → argparse.Namespace.

    `doc` is the script's manual, `flags` are {option: help}, or {option: (what it takes, help)}.
    """
    table = "\n".join(
        f"  {name:18} {what}\n{'':20} default {default}" + f", now {setting(name)}" * (setting(name) != default)
        for name, (default, what) in SETTINGS.items()
    )
    parser = argparse.ArgumentParser(
        description=doc,
        epilog="settings, from the environment:\n" + table,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, text in flags.items():
        option = "--" + flag.replace("_", "-")
        if isinstance(text, tuple):
            parser.add_argument(option, metavar=text[0], help=text[1])
        else:
            parser.add_argument(option, action="store_true", help=text)
    return parser.parse_args(argv)


def run(main):
    """The edge of every script: run `main`; a Failure is one line on stderr and exit status 1.

    Ctrl-C and SIGTERM exit with 130 and 143; they unwind the `with` that closes the connection.
    """

    def stop(signum, frame):
        heed(signal.SIG_IGN)  # a second Ctrl-C must not break into the cleaning up
        _stopped.append(signum)
        if not _writing.locked():
            sys.exit(128 + signum)

    def heed(handler):
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, handler)

    heed(stop)
    try:
        if sys.stdout:
            sys.stdout.reconfigure(errors="backslashreplace")
        main()
        print(end="", flush=True)
    except Failure as failure:
        say(f"{os.path.basename(sys.argv[0])}: {visible(str(failure))[:1000]}")
        sys.exit(1)
    except MemoryError:
        say(f"{os.path.basename(sys.argv[0])}: out of memory: what the server or a file sent was too much")
        sys.exit(1)
    except OSError as error:  # only the terminal, or the pipe in its place, is left to raise this
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):  # `| head` has what it wants
            say(f"{os.path.basename(sys.argv[0])}: can't print the result ({error.strerror})")
        sys.exit(1)
    finally:
        heed(signal.SIG_IGN)


# ---------------------------------------------------------------------------- steps 1 and 2


def server():
    """Wait until /health answers 200 → (body of /health, body of /props), bytes.

    A server that is loading its model answers 503 until it is ready. Raises Failure where nothing
    listens, where it is not ready after VOICE_LLM_TIMEOUT, or where it is no llama-server.
    """
    address()  # one that is no URL does not get better by waiting
    begin, said = clock(), False
    patience = min(timeout(), 30 if shutil.which("voice-llm") else 2)  # a server that was just started
    while True:
        try:
            status, _ = get("/health", min(timeout(), 5))
        except Failure:
            if clock() - begin > patience:
                raise
            status = None
        if status not in (None, 503):
            break
        if clock() - begin > timeout():
            raise Failure(f"the server is still loading after {timeout():g} s: look at its log")
        if not said:
            said = True
            say("the server is not ready yet: waiting")
        time.sleep(0.2)
    bodies = []
    for path in "/health", "/props":
        status, body = get(path)
        try:
            ok = status == 200 and isinstance(json.loads(body), dict)
        except (ValueError, RecursionError):
            ok = False
        if not ok:
            raise Failure(f"{setting('VOICE_LLM_URL')}{path} answered {status}: {words(body)}: is this a llama-server?")
        bodies.append(body)
    return tuple(bodies)


def show(texts):
    """Print what comes in the queue `texts`, until None; in a thread, so that a stalled terminal stops no clock."""
    with contextlib.suppress(OSError):  # the main thread's next print meets it too
        for text in iter(texts.get, None):
            print(visible(text), end="", flush=True)


def main(argv=None):
    options = command_line(__doc__, argv, server="do step 1 instead")
    make_out()
    if options.server:
        health, props = server()
        save({out("health.json"): health, out("props.json"): props})
        print(f"ready: wrote {out('health.json')} and {out('props.json')}")
        return
    say(f"asking: {QUESTION}")
    wait_idle()
    raw, chunks, texts = io.BytesIO(), [], queue.SimpleQueue()
    screen = threading.Thread(target=show, args=(texts,), daemon=True)
    screen.start()
    with Answer(chat(SYSTEM, QUESTION), raw_out=raw) as answer:
        for chunk in answer:
            chunks.append(chunk)
            texts.put(chunk["text"])
    lines = b"".join(to_json(chunk) + b"\n" for chunk in chunks)
    save({out("sse_raw.txt"): raw.getvalue(), out("chunks.jsonl"): lines})
    texts.put(None)
    screen.join()
    print(f"\nfirst token {chunks[0]['t_ms']:.1f} ms, whole answer {answer.total_ms:.1f} ms, {len(chunks)} fragments")
    print(f"wrote {out('sse_raw.txt')} and {out('chunks.jsonl')}")


if __name__ == "__main__":
    run(main)
