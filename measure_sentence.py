#!/usr/bin/env python3
"""Step 6: when the first sentence is complete: a voice assistant can speak.

Streams an answer of three sentences, with the KV cache off, and writes
sentence.json:

  ttft_ms            from just before the request is sent until the first event
                     with content is here
  first_sentence_ms  until the fragment that completes the first sentence
  total_ms           until [DONE]
  first_sentence     the sentence
  text               the whole answer

A sentence ends at the first of . ! ? that white space follows: "3.5" does not
end one. Only the white space tells, so its fragment gives the time. Japanese
and Chinese put no space there: 。 ！ ？ ｡ end one by themselves. Whichever comes
first counts. Without any, the whole answer is one sentence.
"""

import re

import sse

THREE_SENTENCES = "You are a clinic phone assistant. Answer in exactly three short sentences."
BLOOD_TEST = "How do I prepare for a fasting blood test?"
SENTENCE_END = re.compile(r"[.!?](?P<space>\s)|[。！？｡]")


def first_sentence(chunks, total_ms):
    """The first sentence of the fragments `chunks` → (its text, the ms when it was complete)."""
    text = "".join(chunk["text"] for chunk in chunks)
    end = SENTENCE_END.search(text)
    if not end:
        sse.note(
            "no sentence", "no sentence ended before the answer: all of it counts as the first"
        )
        return text, total_ms
    received = 0
    for chunk in chunks:
        received += len(chunk["text"])
        if received >= end.end():  # the mark, and the white space behind it, are here
            break
    return text[: end.end() - bool(end["space"])], chunk["t_ms"]


def measure(messages):
    """One answer → the content of sentence.json. Times in milliseconds. Raises sse.Failure."""
    sse.wait_idle()
    sse.say("three sentences ... ", end="")
    chunks, total_ms, _ = sse.stream(messages, max_tokens=120, cache_prompt=False)
    sentence, sentence_ms = first_sentence(chunks, total_ms)
    times = f"first token {chunks[0]['t_ms']:.1f}, sentence {sentence_ms:.1f}"
    sse.say(f"{times}, answer {total_ms:.1f} ms")
    return {
        "ttft_ms": chunks[0]["t_ms"],
        "first_sentence_ms": sentence_ms,
        "total_ms": total_ms,
        "first_sentence": sentence,
        "text": "".join(chunk["text"] for chunk in chunks),
    }


def main():
    sse.parser(__doc__).parse_args()
    messages = sse.chat(sse.system_prompt(THREE_SENTENCES), sse.questions(BLOOD_TEST)[0])
    sse.prepare()
    result = measure(messages)
    summary = f"the first sentence: {sse.printable(result['first_sentence'])}"
    table = [
        f"first token    {result['ttft_ms']:8.1f} ms",
        f"first sentence {result['first_sentence_ms']:8.1f} ms",
        f"whole answer   {result['total_ms']:8.1f} ms",
    ]
    sse.write_result("sentence.json", result, table, [summary])


if __name__ == "__main__":
    sse.run(main)
