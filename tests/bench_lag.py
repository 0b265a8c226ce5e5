#!/usr/bin/env python3
"""How late is a time stamp, and what does a fragment cost?

  python3 tests/bench_lag.py

A server process puts its own clock into each fragment; each reader stamps the
fragments as it gets them. For sse.stream, for a bare socket loop and for
requests where that is installed (nothing is installed here), in turn over
several rounds:

  lag   from the server's send to the reader's stamp, one fragment every 5 ms,
        like a model's tokens
  cpu   processor time of the reader for a fragment, one every 0.1 ms
  ratio of that to the bare socket loop, which also parses the JSON

The clocks of two processes are one where time.perf_counter is the system's
monotonic clock (Linux, macOS).
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import sse

EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"%s"}}],'
    b'"created":1795977378,"id":"chatcmpl-bseFQKY0P79t2fqTjwiIQq99gYHtVfyp","model":"bench",'
    b'"system_fingerprint":"b0","object":"chat.completion.chunk"}\n\n'
)
DONE = b"data: [DONE]\n\n"
PACE = 0.005  # seconds
GAP = 0.0001


# ---------------------------------------------------------------------------- the server process


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def last(event):
    return event.replace(b"null", b'"stop"', 1)


def serve():
    """Answer requests for ever: max_tokens fragments, paced; for "burst", one every 0.1 ms."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as file:
            length = 0
            while (line := file.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            request = json.loads(file.read(length))
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            )
            count = request["max_tokens"]
            if request["messages"][0]["content"] == "burst":
                for i in range(
                    count
                ):  # one event a send, as servers send them, and none waits to be read
                    until = time.perf_counter() + GAP
                    while time.perf_counter() < until:
                        pass
                    event = EVENT % b" patient"
                    connection.sendall(chunk(last(event) if i == count - 1 else event))
            else:
                begin = time.perf_counter()
                for i in range(count):
                    time.sleep(max(0, begin + i * PACE - time.perf_counter()))
                    event = EVENT % b"%.9f" % time.perf_counter()
                    connection.sendall(chunk(last(event) if i == count - 1 else event))
            connection.sendall(chunk(DONE) + b"0\r\n\r\n")


@contextlib.contextmanager
def server():
    """The server in a process of its own → its port; sets VOICE_LLM_URL."""
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE)
    before = os.environ.get("VOICE_LLM_URL")
    try:
        port = int(process.stdout.readline())
        os.environ["VOICE_LLM_URL"] = f"http://127.0.0.1:{port}"
        yield port
    finally:
        process.kill()
        process.communicate()
        os.environ.pop("VOICE_LLM_URL")
        if before is not None:
            os.environ["VOICE_LLM_URL"] = before


# ---------------------------------------------------------------------------- the readers


def request(kind, count):
    return {
        "messages": [{"role": "user", "content": kind}],
        "max_tokens": count,
        "stream": True,
        "model": "bench",
    }


def read_sse(port, kind, count):
    with sse.Answer(request(kind, count)["messages"], count) as answer:
        return [(answer.start + chunk["t_ms"] / 1000, chunk["text"]) for chunk in answer]


def read_bare_socket(port, kind, count):
    body = json.dumps(request(kind, count)).encode()
    found = []
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        connection.makefile("rb") as file,
    ):
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        while line := file.readline():
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                found.append((now, json.loads(line[6:])["choices"][0]["delta"]["content"]))
            elif line.startswith(b"data: [DONE]"):
                return found
    raise RuntimeError("the bench server cut the answer off")


def read_requests(port, kind, count):
    import requests

    found = []
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with requests.post(url, json=request(kind, count), stream=True) as response:
        for line in response.iter_lines():
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                found.append((now, json.loads(line[6:])["choices"][0]["delta"]["content"]))
    return found


READERS = {
    "bare socket loop": (read_bare_socket, ()),
    "sse.stream": (read_sse, ()),
    "requests": (read_requests, ("requests",)),
}


def cpu_us(read, port, count):
    """Microseconds of this process's processor time for each of `count` fragments."""
    begin = time.process_time()
    found = read(port, "burst", count)
    assert len(found) == count
    return (time.process_time() - begin) / count * 1e6


def lag_us(read, port, count):
    """[microseconds from the server's send to the reader's stamp, …]"""
    return [(stamp - float(text)) * 1e6 for stamp, text in read(port, "paced", count)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    readers = {}
    for name, (read, modules) in READERS.items():
        try:
            versions = [
                getattr(importlib.import_module(module), "__version__", "") for module in modules
            ]
            readers[" ".join([name, *versions[-1:]]).strip()] = read
        except ImportError:
            print(f"{name} is not installed: left out", file=sys.stderr)
    lags, cpus = {name: [] for name in readers}, {name: [] for name in readers}
    with server() as port:
        for number in range(1, options.rounds + 1):
            print(f"round {number} of {options.rounds}", file=sys.stderr)
            for name, read in readers.items():
                lags[name] += lag_us(read, port, 200)
                cpus[name].append(cpu_us(read, port, 5_000))
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}")
    print(f"{'reader':24} {'lag p50':>10} {'lag p99':>10} {'cpu':>10} {'ratio':>7}")
    bare = min(cpus["bare socket loop"])
    for name in readers:
        p50, p99 = statistics.median(lags[name]), statistics.quantiles(lags[name], n=100)[-1]
        cpu = min(cpus[name])
        print(f"{name:24} {p50:7.0f} µs {p99:7.0f} µs {cpu:7.1f} µs {cpu / bare:7.2f}")


if __name__ == "__main__":
    main()
