#!/usr/bin/env python3
"""Step 4: what prefill costs as the prompt grows.

Sends one question three times, with the first 0, 4 and 12 documents behind the system prompt and
the KV cache off, and writes prefill.json, a list of three:

  docs               how many documents
  prompt_n           tokens of the prompt that the server computed (timings.prompt_n)
  prompt_ms          the time it took for them: prefill (timings.prompt_ms)
  ttft_ms            from just before the request is sent until the first event with content is here

With the cache left on, the server would skip what it shares with the request before, and the
figures would blur.
"""

import os

import sse

QUESTION = "When is the clinic open on Saturday?"
COUNTS = (0, 4, 12)


def documents():
    """The texts of the *.md files of VOICE_LLM_KB, in the order of their names.

    Raises sse.Failure where there is none, or naming the file that can't be read.
    """
    folder = sse.setting("VOICE_LLM_KB")
    with sse.reading(folder, "set VOICE_LLM_KB to the folder of the documents"):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".md") and not name.startswith("."))
    texts = []
    for path in (os.path.join(folder, name) for name in names):
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise sse.Failure(f"{path} is not a file: take it out of VOICE_LLM_KB")
        with sse.reading(path, "mend it, or take it out of VOICE_LLM_KB"), open(path, encoding="utf-8-sig") as file:
            texts.append(file.read().strip())
    if not texts:
        raise sse.Failure(f"there is no *.md in {folder}: set VOICE_LLM_KB to the folder of the documents")
    return texts


def long_prompt(texts):
    """The system prompt with `texts` behind it."""
    return "\n\n".join([sse.SYSTEM, *texts])


def measure(texts):
    """Three answers → the content of prefill.json. Times in milliseconds. Raises sse.Failure."""
    if len(texts) < max(COUNTS):
        raise sse.Failure(
            f"{len(texts)} documents in {sse.setting('VOICE_LLM_KB')}, but this step takes {max(COUNTS)}: "
            "add some, or set VOICE_LLM_KB"
        )
    rows = []
    for docs in COUNTS:
        sse.wait_idle()
        messages = sse.chat(long_prompt(texts[:docs]), QUESTION)
        chunks, _, timings = sse.stream(messages, max_tokens=32, cache_prompt=False)
        rows.append(
            {
                "docs": docs,
                "prompt_n": sse.timing(timings, "prompt_n"),
                "prompt_ms": sse.timing(timings, "prompt_ms"),
                "ttft_ms": chunks[0]["t_ms"],
            }
        )
        sse.say(
            "{docs:2} documents: {prompt_n} tokens, prefill {prompt_ms:.1f} ms, first token {ttft_ms:.1f} ms".format(
                **rows[-1]
            )
        )
    return rows


def main(argv=None):
    sse.command_line(__doc__, argv)
    sse.make_out()
    sse.say(f"asking with {COUNTS} documents: {QUESTION}")
    rows = measure(documents())
    sse.save({sse.out("prefill.json"): rows})
    print("documents   tokens   prefill ms   first token ms")
    for row in rows:
        print("{docs:9} {prompt_n:8} {prompt_ms:12.1f} {ttft_ms:16.1f}".format(**row))
    print(f"wrote {sse.out('prefill.json')}")


if __name__ == "__main__":
    sse.run(main)
