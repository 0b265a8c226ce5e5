#!/usr/bin/env python3
"""A llama-server as this suite sees one, without a model: its times are simulated.

  python3 tests/fake_server.py            serves http://127.0.0.1:8080
  … --port 0           a free port; the first line on stdout is the URL
  … --fault no_done    misbehaves as faults.py says; --faults lists the names

One slot. A prompt costs time for each token that the slot does not hold
already, an answer costs time for each token. Like the real server (b11434) it
sends the headers before the prompt is computed and the role together with the
first token. When the client has left, it stops within a token while tokens
flow; during prefill it notices that only after a second in which it answered
nobody, not even on /slots, and it finishes the batch at work.
"""

import argparse
import contextlib
import http.server
import itertools
import json
import os
import re
import select
import socket
import struct
import sys
import threading
import time

import faults

ANSWERS = {
    "What should a new patient bring?": "Please bring your photo ID, your insurance card and a "
    "list of the medicines that you take.",
    "When is the clinic open on Saturday?": "On Saturday we are open from 9:00 a.m. to 1:00 p.m., "
    "for booked visits and urgent cases.",
    "How do I prepare for a fasting blood test?": "Eat nothing for ten hours before the test. "
    "Drink only water, about 0.5 liters. Take your usual medicines unless the "
    "doctor told you not to.",
    "List the numbers from 1 to 300, separated by commas.": ", ".join(map(str, range(1, 301))),
    # and the lines of a call
    "Hello, I'd like to come on Saturday. When are you open?": "We are open from nine to one.",
    "It is for a blood test. May I have breakfast before it?": "No, please come without breakfast. "
    "Water is fine.",
    "And what about my tablets in the morning, should I take them?": "Yes, take them as usual.",
    "Sorry, I meant to ask something else: where can I park?": "Behind the house. It is free for "
    "two hours.",
    "All right. What do we have to bring with us?": "Bring your insurance card.",
}


def tokenize(text):
    """`text` in pieces of about a model's size; joined they are `text` again."""
    return re.findall(r" ?\w{1,7}| ?[^\w\s]|\s", text)


def render(messages):
    """The messages as the prompt that a chat template of the ChatML kind makes of them."""
    if not messages or messages[0].get("role") != "system":
        messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    turns = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )
    return turns + "<|im_start|>assistant\n"


def shared(prompt, tokens):
    """How many tokens are the same from the first on."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, tokens))))


class Refused(Exception):
    """An error that is known before the first token: (HTTP status, type, message)."""


class ClientGone(Exception):
    """The client has closed the connection."""


class Slot:
    """The one slot: what its KV cache holds, who has it, and what it costs to fill it."""

    def __init__(self, fake, prompt_ms, token_ms, n_ctx, batch):
        self.fake, self.prompt_ms, self.token_ms, self.n_ctx, self.batch = (
            fake,
            prompt_ms,
            token_ms,
            n_ctx,
            batch,
        )
        self.lock = threading.Lock()
        self.tokens, self.kept_prompt = (
            [],
            [],
        )  # kept_prompt: one that another slot or cache still holds, in a test
        self.task = 0
        self.processing = 0  # the task at work

    def answer(self, request, wire):
        """Yield the events of one answer, as dicts, at the times at which a server has them.

        Raises Refused for a prompt longer than the context, ClientGone as soon as it notices that
        the client has left.
        """
        messages = request.get("messages")
        if not isinstance(messages, list):
            raise Refused(400, "invalid_request_error", "'messages' is required")
        prompt = tokenize(render(messages))
        self.task += 1
        task = wire.task = self.task
        if len(prompt) >= self.n_ctx:
            most = f"the available context size ({self.n_ctx} tokens)"
            what = f"request ({len(prompt)} tokens) exceeds {most}"
            self.fake.log(f"E srv    send_error: task id = {task}, error: {what}")
            # The real server logs this too: it does not prove that a hang-up was noticed.
            self.fake.log(f"W srv          stop: cancel task, id_task = {task}")
            raise Refused(400, "exceed_context_size_error", what)
        question = str(messages[-1]["content"]).split("\n")[-1]  # behind a line with the time
        reply = ANSWERS.get(question, "Hello, how can I help you today?")
        if request.get("ignore_eos"):  # it says the same again, up to max_tokens
            reply = " ".join([reply] * request["max_tokens"])
        reply = tokenize(reply)
        yield None  # accepted: from here on the status is 200
        while not self.lock.acquire(timeout=0.002):
            if wire.noticed():
                raise ClientGone
        try:
            self.processing = task
            self.fake.log(
                f"I slot launch_slot_: id  0 | task {task} | processing task, is_child = 0"
            )
            yield from self._run(request, prompt, reply, wire)
        except ClientGone:
            time.sleep(self.token_ms / 1000)  # the token at work is still computed
            raise
        finally:
            held = f"n_tokens = {len(self.tokens)}"
            self.fake.log(f"I slot      release: id  0 | task {task} | stop processing: {held}")
            self.processing = 0
            self.lock.release()

    def _run(self, request, prompt, reply, wire):
        cache_n = 0
        if request.get("cache_prompt", True):
            cache_n = min(
                max(shared(prompt, self.tokens), shared(prompt, self.kept_prompt)), len(prompt) - 1
            )
        begin, done = time.perf_counter(), cache_n
        while done < len(prompt):
            done = min(done + self.batch, len(prompt))
            noticed = False
            while (
                left := begin + (done - cache_n) * self.prompt_ms / 1000 - time.perf_counter()
            ) > 0:
                time.sleep(min(left, 0.01))
                noticed = noticed or wire.noticed()
            self.tokens = prompt[:done]
            if noticed:
                raise ClientGone
        first, prompt_n = time.perf_counter(), len(prompt) - cache_n
        most = request.get("max_tokens", -1)
        predicted = reply[:most] if most >= 0 else reply
        stops = len(predicted) == len(reply)

        def figures(predicted_n):
            predicted_ms = (time.perf_counter() - first) * 1000
            return timings(cache_n, prompt_n, (first - begin) * 1000, predicted_n, predicted_ms)

        yield event({"role": "assistant", "content": None})
        for i, token in enumerate(predicted):
            wire.pause(first + i * self.token_ms / 1000 - time.perf_counter())
            if not self.fake.forgets:
                self.tokens = self.tokens + [token]
            self.fake.last_result = time.perf_counter()
            told = {"timings": figures(i + 1)} if request.get("timings_per_token") else {}
            yield {**event({"content": token}), **told}
        if stops:  # by the token that ends an answer: it counts, but has no text
            wire.pause(self.token_ms / 1000)
        last = event({}, finish_reason="stop" if stops else "length")
        yield {**last, "timings": figures(len(predicted) + stops)}


def event(delta, finish_reason=None):
    return {
        "choices": [{"finish_reason": finish_reason, "index": 0, "delta": delta}],
        "created": int(time.time()),
        "id": "chatcmpl-simulated",
        "model": "simulated",
        "system_fingerprint": "simulated",
        "object": "chat.completion.chunk",
    }


def timings(cache_n, prompt_n, prompt_ms, predicted_n, predicted_ms):
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n,
        "prompt_per_second": 1000 * prompt_n / max(prompt_ms, 0.001),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(predicted_n, 1),
        "predicted_per_second": 1000 * predicted_n / max(predicted_ms, 0.001),
    }


class Wire(http.server.BaseHTTPRequestHandler):
    """One connection, with words for what a server does on it, right or wrong."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    framing = "chunked"  # or "length", "close": how the client knows where the body ends
    closed_ms, task, cancel_logged = None, 0, False

    def log_message(self, *args):
        pass

    def head(self, status=200, kind="text/event-stream", framing="chunked", version="HTTP/1.1"):
        self.framing = framing
        self.protocol_version = version
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        if framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()

    def send(self, data):
        """Send bytes of the body at once: one HTTP chunk, where it is chunked."""
        try:
            self.wfile.write(
                b"%x\r\n%s\r\n" % (len(data), data) if self.framing == "chunked" else data
            )
        except OSError:  # reset by a client that has left
            self.left(0)
            self.cancel()

    def event(self, value):
        now = time.perf_counter()  # before it is sent: nobody has it earlier
        if faults.content(value):
            self.server.fake.sent_ms[-1].append((now - self.received) * 1000)
        self.send(faults.data(value))

    def done(self):
        self.send(b"data: [DONE]\n\n")
        self.end()

    def end(self):
        if self.framing == "chunked":
            with contextlib.suppress(OSError):
                self.wfile.write(b"0\r\n\r\n")

    def json(self, value, status=200):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status, kind, message):
        self.json({"error": {"code": status, "message": message, "type": kind}}, status)

    def left(self, seconds):
        """Wait → True the moment the client closes the connection, False after `seconds`."""
        until = time.perf_counter() + seconds
        while True:
            left = max(0, until - time.perf_counter())
            if select.select([self.connection], [], [], left)[0]:
                with contextlib.suppress(OSError):
                    if self.connection.recv(1, socket.MSG_PEEK):
                        raise RuntimeError("a second request before the first was answered")
                if self.command == "POST" and self.closed_ms is None:
                    self.closed_ms = (time.perf_counter() - self.received) * 1000
                    self.server.fake.closed_ms.append(self.closed_ms)
                return True
            if left == 0:
                return False

    def noticed(self):
        """Whether a llama-server has noticed by now that the client has left.

        The thread that holds a connection waits for a result of the server, whosever it is, and
        looks at its client only when none has come for a second: recv_with_timeout in
        tools/server/server-queue.cpp.
        """
        fake, now = self.server.fake, time.perf_counter()
        gone = self.left(0)
        if fake.last_result > self.last_look:
            self.last_look = fake.last_result
        if now - self.last_look < fake.silence:
            return False
        self.last_look = now
        if gone and not self.cancel_logged:
            self.cancel_logged = True
            fake.log(f"W srv          stop: cancel task, id_task = {self.task}")
        return gone

    def pause(self, seconds):
        """Wait; raises ClientGone the moment the client closes the connection."""
        if self.left(seconds):
            self.cancel()

    def silence(self):
        """Send nothing more; the client has to leave."""
        self.pause(3600)

    def cancel(self):
        if self.command == "POST":
            self.server.fake.log(f"W srv          stop: cancel task, id_task = {self.task}")
        raise ClientGone

    def reset(self):
        """Break the connection off with a TCP reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def do_GET(self):
        fake = self.server.fake
        fake.keys.append(self.headers.get("Authorization"))
        fake.paths.append(self.path)
        fake.times.append(time.perf_counter())
        if self.path == "/slots":
            fake.last_result = fake.times[-1]
        if fault := faults.of(fake.fault, self.path):
            with contextlib.suppress(ClientGone):
                fault(self, fake.slots())
        elif self.path == "/health" and time.perf_counter() < fake.ready_at:
            self.error(503, "unavailable_error", "Loading model")
        elif self.path == "/health":
            self.json({"status": "ok"})
        elif self.locked():
            pass
        elif self.path == "/props":
            self.json(fake.props())
        elif self.path == "/slots":
            self.json(fake.slots())
        else:
            self.error(404, "not_found_error", "File Not Found")

    def locked(self):
        """Whether the request lacks the key, and was refused."""
        key = self.server.fake.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.error(401, "authentication_error", "Invalid API Key")
        return True

    def do_POST(self):
        self.received = self.last_look = time.perf_counter()
        self.closed_ms, self.cancel_logged = None, False
        fake = self.server.fake
        fake.keys.append(self.headers.get("Authorization"))
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client has left in the middle of its request
            self.close_connection = True
            return
        if self.locked():
            return
        if self.path != faults.CHAT:
            self.error(404, "not_found_error", "File Not Found")
            return
        request = json.loads(body)
        fake.paths.append(self.path)
        fake.times.append(self.received)
        fake.requests.append(request)
        fake.bodies.append(body)
        request = self.request_body = {k: v for k, v in request.items() if k not in fake.ignores}
        fake.sent_ms.append([])
        with contextlib.closing(fake.slot.answer(request, self)) as events:
            try:
                next(events)
                faults.of(fake.fault, self.path, faults.right)(self, events)
            except Refused as refused:
                self.error(*refused.args)
            except ClientGone:
                self.close_connection = True

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class FakeServer:
    """The server in a thread.

    prompt_ms, token_ms: the time a token of the prompt, of the answer takes. batch: tokens of a
    prompt that are computed before it looks up. silence: seconds without any answer after which it
    looks whether a client has left. loading: seconds of 503. forgets: the slot does not keep the
    answer. ignores: fields of a request that it does not know. api_key: what it asks for, on all
    paths but /health. props: what /props has beside the usual.

    In a test: `paths` and `times`, what it was asked for and when; `keys`, the Authorization of
    each; `requests` and `bodies`, what it got;
    `sent_ms`, for each when its fragments were sent, and `closed_ms`, when a client left, both in
    ms since it got that request; `log_lines`.
    """

    def __init__(
        self,
        port=0,
        prompt_ms=0.8,
        token_ms=10.0,
        n_ctx=4096,
        batch=2048,
        silence=1.0,
        loading=0.0,
        fault=None,
        log=None,
        forgets=False,
        ignores=(),
        api_key=None,
        props=None,
    ):
        self.keys, self.bodies = [], []
        self.paths, self.times, self.requests, self.sent_ms, self.closed_ms, self.log_lines = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self.begin = self.last_result = time.perf_counter()
        self.log_file, self.fault, self.silence = log, fault, silence
        self.forgets, self.ignores, self.api_key = forgets, ignores, api_key
        self.changed_props = props or {}
        self.ready_at = self.begin + loading
        self.slot = Slot(self, prompt_ms, token_ms, n_ctx, batch)
        self.http = Server(("127.0.0.1", port), Wire)
        self.http.fake = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.log(f"I srv  llama_server: listening on {self.url}")

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self.http.shutdown()
        self.http.server_close()

    def log(self, text):
        seconds = time.perf_counter() - self.begin
        line = f"0.{seconds // 60:02.0f}.{seconds % 60:06.3f} {text}"
        self.log_lines.append(line)
        if self.log_file:
            print(line, file=self.log_file, flush=True)

    def slots(self):
        task = self.slot.processing
        slot = {"id": 0, "n_ctx": self.slot.n_ctx, "is_processing": bool(task)}
        return [dict(slot, id_task=task or self.slot.task) if self.slot.task else slot]

    def props(self):
        return {
            "default_generation_settings": {"n_ctx": self.slot.n_ctx},
            "total_slots": 1,
            "model_alias": "simulated",
            "model_path": "simulated: a fake server without a model",
            "build_info": "simulated",
            **self.changed_props,
        }


def end_with(parent):
    """End this process when the one that started it is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for option, kind, default, what in (
        ("--port", int, 8080, "0: a free one"),
        ("--prompt-ms", float, 0.8, "per token of the prompt"),
        ("--token-ms", float, 10.0, "per token of the answer"),
        ("--n-ctx", int, 4096, "tokens of context"),
        ("--batch", int, 2048, "tokens of a prompt in one go"),
        ("--loading", float, 0.0, "seconds of answering 503 at the start"),
    ):
        what += " (default %(default)s)"
        parser.add_argument(option, type=kind, default=default, help=what)
    parser.add_argument("--fault", choices=sorted(faults.FAULTS), metavar="NAME", help="misbehave")
    parser.add_argument("--faults", action="store_true", help="list the names of the faults")
    parser.add_argument("--log", type=argparse.FileType("a"), help="a file for the server's log")
    ends = "end when the starting process ends"
    parser.add_argument("--end-with-parent", action="store_true", help=ends)
    options = parser.parse_args()
    if options.faults:
        with contextlib.suppress(BrokenPipeError):  # `| head` has what it wants
            for name, fault in sorted(faults.FAULTS.items()):
                where = "" if fault.path == faults.CHAT else f"on {fault.path}: "
                print(f"{name:24} {where}{fault.what}", flush=True)
            return
        os._exit(1)  # or Python tries once more to print the rest
    if options.end_with_parent:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    names = "port", "prompt_ms", "token_ms", "n_ctx", "batch", "loading", "fault", "log"
    try:
        fake = FakeServer(**{name: getattr(options, name) for name in names})
    except (OSError, OverflowError) as error:
        sys.exit(
            f"fake_server.py: can't serve on port {options.port} ({error}): "
            "--port 0 takes a free one"
        )
    print(fake.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        fake.http.serve_forever()


if __name__ == "__main__":
    main()
