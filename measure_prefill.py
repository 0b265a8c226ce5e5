#!/usr/bin/env python3
"""Step 4: what prefill costs as the prompt grows.

Sends one question three times, with the first 0, 4 and 12 documents behind the
system prompt and the KV cache off, and writes prefill.json, a list of three:

  docs       how many documents
  prompt_n   tokens of the prompt that the server computed (timings.prompt_n)
  prompt_ms  the time that took: prefill (timings.prompt_ms)
  ttft_ms    from just before the request is sent until the first event with
             content is here

With the cache on, the server would skip what a prompt shares with the one
before, and the figures would blur. With VOICE_LLM_KB=none, the system prompt
alone is sent, and the list has one.
"""

import os

import sse

SATURDAY = "When is the clinic open on Saturday?"
COUNTS = (0, 4, 12)


def question():
    """The caller's question of steps 4 and 5. Raises sse.Failure."""
    return sse.questions(SATURDAY)[0]


def documents(most=None):
    """The texts of the first `most` *.md files of VOICE_LLM_KB, or all, by their names; none where
    that is "none". Empty ones are noted.

    Raises sse.Failure where there is none, or naming the file that can't be read.
    """
    folder = sse.setting("VOICE_LLM_KB")
    if folder == "none":
        return []
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests", "kb")
    hint = f"set VOICE_LLM_KB to a folder of documents (the suite's own: {own}), or to none"
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".md"))
    except OSError as error:
        raise sse.Failure(f"can't read {folder} ({sse.reason(error)}): {hint}") from None
    names = [name for name in names if not name.startswith(".")]
    if not names:
        raise sse.Failure(f"there is no *.md in {folder}: {hint}")
    convert = "convert it to UTF-8 and make it readable, or remove it from VOICE_LLM_KB"
    texts = [sse.read_text(os.path.join(folder, name), convert) for name in names[:most]]
    empty = [name for name, text in zip(names, texts) if not text]
    if empty:
        sse.note("empty", f"empty, so it adds no tokens to the prompt: {', '.join(empty)}")
    return texts


def long_prompt(texts):
    """The system prompt with `texts` behind it. Raises sse.Failure, see sse.system_prompt."""
    return "\n\n".join([sse.system_prompt(sse.SYSTEM), *texts])


def enough_documents():
    """The texts of the first documents(). Raises sse.Failure where they are too few for step 4."""
    texts = documents(COUNTS[-1])
    if 0 < len(texts) < COUNTS[-1]:
        found = f"{sse.plural(len(texts), 'document')} in {sse.setting('VOICE_LLM_KB')}"
        hint = "add some, or set VOICE_LLM_KB to another folder, or to none"
        raise sse.Failure(f"{found}, but step 4 takes {COUNTS[-1]}: {hint}")
    return texts


def measure(texts):
    """An answer for each prompt → the content of prefill.json, ms. Raises sse.Failure."""
    rows = []
    for docs in COUNTS if texts else [0]:
        sse.wait_idle()
        sse.say(f"{sse.plural(docs, 'document')} ... ", end="")
        messages = sse.chat(long_prompt(texts[:docs]), question())
        chunks, _, timings = sse.stream(messages, max_tokens=32, cache_prompt=False)
        row = {
            "docs": docs,
            "prompt_n": sse.required_timing(timings, "prompt_n"),
            "prompt_ms": sse.required_timing(timings, "prompt_ms"),
            "ttft_ms": chunks[0]["t_ms"],
        }
        rows.append(row)
        times = f"prefill {row['prompt_ms']:.1f} ms, first token {row['ttft_ms']:.1f} ms"
        sse.say(f"{sse.plural(row['prompt_n'], 'token')}, {times}")
    return rows


def main():
    options = sse.parser(__doc__)
    options.add_argument(
        "--check", action="store_true", help="check the documents and the settings, and ask nothing"
    )
    check = options.parse_args().check
    texts = enough_documents()
    long_prompt(texts)  # better to fail before the folder is made
    if check:
        documents()  # step 5 sends all
        sse.check_settings()
        return
    sse.prepare()
    rows = measure(texts)
    table = ["documents   tokens   prefill ms   first token ms"]
    table += [
        f"{row['docs']:9} {row['prompt_n']:8} {row['prompt_ms']:12.1f} {row['ttft_ms']:16.1f}"
        for row in rows
    ]
    sse.write_result("prefill.json", rows, table)


if __name__ == "__main__":
    sse.run(main)
