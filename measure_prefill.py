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
before, and the figures would blur.
"""

import os

import sse

SATURDAY = "When is the clinic open on Saturday?"
COUNTS = (0, 4, 12)


def question():
    """The caller's question of steps 4 and 5."""
    return sse.setting("VOICE_LLM_QUESTION") or SATURDAY


def documents(most=None):
    """The texts of the first `most` *.md files of VOICE_LLM_KB, or all, by their names; empty ones are noted.

    Raises sse.Failure where there is none, or naming the file that can't be read.
    """
    folder = sse.setting("VOICE_LLM_KB")
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests", "kb")
    what_to_do = f"set VOICE_LLM_KB to the folder of the documents (the suite's own: {own})"
    try:
        names = sorted(
            name for name in os.listdir(folder) if name.endswith(".md") and not name.startswith(".")
        )
    except OSError as error:
        raise sse.Failure(f"can't read {folder} ({sse.error_words(error)}): {what_to_do}") from None
    if not names:
        raise sse.Failure(f"there is no *.md in {folder}: {what_to_do}")
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
    """The texts of the first documents(). Raises sse.Failure where they are too few for this step."""
    texts = documents(max(COUNTS))
    if len(texts) < max(COUNTS):
        raise sse.Failure(
            f"{sse.plural(len(texts), 'document')} in {sse.setting('VOICE_LLM_KB')}, but step 4 takes {max(COUNTS)}: "
            "add some, or set VOICE_LLM_KB"
        )
    return texts


def measure(texts):
    """Three answers → the content of prefill.json. Times in milliseconds. Raises sse.Failure."""
    prompts = {docs: long_prompt(texts[:docs]) for docs in COUNTS}
    rows = []
    for docs, prompt in prompts.items():
        sse.wait_idle()
        sse.say(f"{sse.plural(docs, 'document')} ... ", end="")
        chunks, _, timings = sse.stream(
            sse.chat(prompt, question()), max_tokens=32, cache_prompt=False
        )
        prompt_n, prompt_ms = (
            sse.required_timing(timings, "prompt_n"),
            sse.required_timing(timings, "prompt_ms"),
        )
        rows.append(
            {
                "docs": docs,
                "prompt_n": prompt_n,
                "prompt_ms": prompt_ms,
                "ttft_ms": chunks[0]["t_ms"],
            }
        )
        times = f"prefill {prompt_ms:.1f} ms, first token {chunks[0]['t_ms']:.1f} ms"
        sse.say(f"{sse.plural(prompt_n, 'token')}, {times}")
    return rows


def main():
    options = sse.parser(__doc__)
    options.add_argument(
        "--check", action="store_true", help="check the documents and the settings, and ask nothing"
    )
    check = options.parse_args().check
    texts = enough_documents()
    long_prompt(texts)
    if check:
        documents()
        sse.address()
        sse.timeout()
        return
    sse.make_out()
    rows = measure(texts)
    table = ["documents   tokens   prefill ms   first token ms"]
    table += [
        f"{row['docs']:9} {row['prompt_n']:8} {row['prompt_ms']:12.1f} {row['ttft_ms']:16.1f}"
        for row in rows
    ]
    sse.write_result("prefill.json", rows, table)


if __name__ == "__main__":
    sse.run(main)
