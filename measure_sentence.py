#!/usr/bin/env python3
"""Step 6: when the first sentence is complete, the moment a voice assistant can start to speak.

Streams an answer of three sentences and writes sentence.json:

  ttft_ms            from just before the request is sent until the first event with content is here
  first_sentence_ms  until the fragment that completes the first sentence is here
  total_ms           until [DONE]
  first_sentence     the sentence
  text               the whole answer

A sentence ends at the first of . ! ? that white space follows: "3.5" does not end one. Only the
white space tells, so its fragment gives the time. Without such a place the whole answer is one
sentence, complete at its end.
"""

import re

import sse

SYSTEM = "You are a clinic phone assistant. Answer in exactly three short sentences."
QUESTION = "How do I prepare for a fasting blood test?"


def first_sentence(chunks, total_ms):
    """The first sentence of the fragments `chunks` → (its text, the ms at which it was complete)."""
    text = "".join(chunk["text"] for chunk in chunks)
    end = re.search(r"[.!?](?=\s)", text)
    if not end:
        return text, total_ms
    received = 0
    for chunk in chunks:
        received += len(chunk["text"])
        if received > end.end():  # the white space behind the mark is here
            break
    return text[: end.end()], chunk["t_ms"]


def measure():
    """One answer → the content of sentence.json. Times in milliseconds. Raises sse.Failure."""
    sse.wait_idle()
    chunks, total_ms, _ = sse.stream(sse.chat(SYSTEM, QUESTION), max_tokens=120)
    sentence, sentence_ms = first_sentence(chunks, total_ms)
    return {
        "ttft_ms": chunks[0]["t_ms"],
        "first_sentence_ms": sentence_ms,
        "total_ms": total_ms,
        "first_sentence": sentence,
        "text": "".join(chunk["text"] for chunk in chunks),
    }


def main(argv=None):
    sse.command_line(__doc__, argv)
    sse.make_out()
    sse.say(f"asking: {QUESTION}")
    result = measure()
    sse.save({sse.out("sentence.json"): result})
    print(f"first token    {result['ttft_ms']:8.1f} ms")
    print(f"first sentence {result['first_sentence_ms']:8.1f} ms  {sse.visible(result['first_sentence'])}")
    print(f"whole answer   {result['total_ms']:8.1f} ms")
    print(f"wrote {sse.out('sentence.json')}")


if __name__ == "__main__":
    sse.run(main)
