#!/usr/bin/env python3
"""Step 7: how fast generation stops when the caller hangs up.

Asks for a long answer, closes the connection after 0.5 s, and writes cancel.json:

  max_tokens         what was asked for
  received_tokens    fragments with content that came before the close
  closed_at_ms       the close, from just before the request was sent
  slot_idle_after_ms from the close until /slots shows no slot that is processing

With --during-prefill it hangs up on the prompt instead: all documents, the KV cache off, closed
after 0.1 s, before the first token. It writes cancel_prefill.json: docs, how many documents, in
place of max_tokens, and the other three.

Closing is what tells the server to stop; one who only stops reading leaves it at work. A test whose
answer had ended before the close shows nothing, and is not written.
"""

import sse
from measure_prefill import QUESTION, documents, long_prompt

COUNTING = "List the numbers from 1 to 300, separated by commas."
MAX_TOKENS = 256


def hang_up(messages, cut_after, max_tokens=64, cache_prompt=True):
    """Stream an answer, close after `cut_after` seconds, wait for the idle slot → the three figures of both files.

    Raises sse.Failure; also where the answer had ended before the close.
    """
    sse.say(f"asking, to hang up after {cut_after * 1000:.0f} ms")
    sse.wait_idle(required=True)
    with sse.Answer(messages, max_tokens, cache_prompt, cut_after=cut_after) as answer:
        received = sum(1 for _ in answer)
    if answer.ended:
        raise sse.Failure(
            f"the answer had ended before the close at {cut_after * 1000:.0f} ms, so this test is void: "
            "use a model that is slower, or that keeps on counting"
        )
    # Without a fragment the request may still be on its way to the slot, which looks idle until then.
    idle = sse.wait_idle(required=True, steady=0 if received else 1)
    idle_ms = (idle - answer.start) * 1000 - answer.closed_at_ms
    sse.say(f"closed at {answer.closed_at_ms:.1f} ms, {received} fragments received, slot idle {idle_ms:.1f} ms later")
    return {
        "received_tokens": received,
        "closed_at_ms": round(answer.closed_at_ms, 3),
        "slot_idle_after_ms": round(idle_ms, 3),
    }


def during_generation():
    """→ the content of cancel.json. Times in milliseconds. Raises sse.Failure."""
    messages = [{"role": "user", "content": COUNTING}]
    result = {"max_tokens": MAX_TOKENS, **hang_up(messages, 0.5, max_tokens=MAX_TOKENS)}
    if not result["received_tokens"]:
        sse.say("no fragment came before the close: it met the prompt's computation, and not the answer's")
    return result


def during_prefill(texts):
    """→ the content of cancel_prefill.json. Times in milliseconds. Raises sse.Failure."""
    result = {"docs": len(texts), **hang_up(sse.chat(long_prompt(texts), QUESTION), 0.1, cache_prompt=False)}
    if result["received_tokens"]:
        raise sse.Failure(
            "the first token came before the close at 100 ms, so this test is void: "
            "add documents to VOICE_LLM_KB until prefill takes longer"
        )
    return result


def main(argv=None):
    options = sse.command_line(__doc__, argv, during_prefill="hang up while the prompt is still being computed")
    sse.make_out()
    if options.during_prefill:
        name, result = "cancel_prefill.json", during_prefill(documents())
    else:
        name, result = "cancel.json", during_generation()
    sse.save({sse.out(name): result})
    print(f"closed at      {result['closed_at_ms']:10.1f} ms, {result['received_tokens']} fragments received")
    print(f"slot idle after{result['slot_idle_after_ms']:10.1f} ms")
    print(f"wrote {sse.out(name)}")


if __name__ == "__main__":
    sse.run(main)
