#!/usr/bin/env python3
"""Step 7: how fast generation stops when the caller hangs up.

Asks for a long answer, closes the connection after 0.5 s, writes cancel.json:

  max_tokens          what was asked for
  received_tokens     fragments with content that came before the close
  closed_at_ms        the close, from just before the request was sent
  slot_idle_after_ms  from the close until /slots shows that the request is over

The same prompt is sent once before, for one token: with the prompt in the KV
cache, the half second meets the answer and not the prefill.

With --during-prefill it hangs up on the prompt instead: all documents, the KV
cache off, closed after 0.1 s. At that moment somebody else asks "hi". Nobody
looks at /slots, since llama-server notices a hang-up during prefill only after
a second in which it answers nobody. It writes cancel_prefill.json:

  docs                how many documents
  closed_at_ms        as above
  next_ttft_ms        what the next caller waits: from the close until the first
                      token of that answer
  next_prompt_ms      the prefill of "hi" itself (timings.prompt_ms)

Closing is what tells the server to stop; whoever only stops reading leaves it
at work. A close that did not meet what it should is void: nothing is written.
"""

import contextlib
import time

import sse
from measure_prefill import documents, long_prompt, question

COUNTING = [{"role": "user", "content": "List the numbers from 1 to 300, separated by commas."}]
HI = [{"role": "user", "content": "hi"}]
MAX_TOKENS = 256
CUT, EARLY_CUT, LATE = (
    0.5,
    0.1,
    0.5,
)  # seconds: the two closes, and how much later than that is too late
TOO_FAR = "it is too far away, or was about to refuse: set VOICE_LLM_URL to a server near by, or look at its log"


def void(why, what_to_do):
    """The Failure for a close that did not meet what it should."""
    return sse.Failure(f"{why}, so this test is void: {what_to_do}")


def at_work():
    """The requests that the slots are processing → [id_task, or None in old builds, …]. Raises sse.Failure."""
    return [slot.get("id_task") for slot in sse.slots(required=True) if slot["is_processing"]]


def end_of(task):
    """Wait until no slot is processing `task` → the sse.clock() at which that was seen. Raises sse.Failure."""
    begin = sse.clock()
    while True:
        asked = sse.clock()
        busy = task in at_work()
        now = sse.clock()
        if not busy:
            break
        if now - begin > sse.timeout():
            raise sse.Failure(
                f"the slot is still busy {sse.timeout():g} s after the close: look at the server's log"
            )
        time.sleep(0.003)
    if now - asked > max(0.05, 0.1 * (now - begin)):
        what = f"/slots took {(now - asked) * 1000:.0f} ms to answer, so the slot may have been idle as much earlier"
        sse.note("slow slots", f"{what}: the network, a proxy, or a busy machine")
    return now


def check_close(answer, seconds):
    """Raise sse.Failure where the close of `answer` came later than it should: the process slept, say."""
    if answer.closed_at_ms > (seconds + LATE) * 1000:
        late = f"the close came at {answer.closed_at_ms:.0f} ms, not at {seconds * 1000:.0f}"
        raise void(
            f"{late}: this process was suspended, or the machine is too busy", "run this again"
        )


def during_generation():
    """→ the content of cancel.json. Times in milliseconds. Raises sse.Failure."""
    sse.wait_idle(required=True)
    begin = sse.clock()
    sse.say("one token, so that the prompt is in the KV cache ... ", end="")
    with contextlib.suppress(sse.Failure), sse.Answer(COUNTING, max_tokens=1) as answer:
        list(answer)  # what goes wrong here goes wrong again below
    sse.say(f"{(sse.clock() - begin) * 1000:.0f} ms")
    sse.wait_idle(required=True)
    sse.say("hanging up ... ", end="")
    tasks = None
    with sse.Answer(COUNTING, MAX_TOKENS, cut_after=CUT) as answer:
        for _ in answer:
            if not tasks:
                with contextlib.suppress(sse.Failure):
                    found = at_work()
                    if answer.closed_at_ms is None:  # a look that ends later proves nothing
                        tasks = found
    check_close(answer, CUT)
    close = f"the close at {CUT * 1000:.0f} ms"
    if answer.finish_reason or answer.total_ms is not None:
        raise void(
            f"the answer had ended before {close}",
            "use a slower model, or one that goes on counting",
        )
    if answer.accepted_ms is None:
        raise void(f"the server had not answered by {close}", TOO_FAR)
    if not answer.received and answer.first_token_ms is not None:
        raise void(
            f"only reasoning came before {close}", "start llama-server with --reasoning-budget 0"
        )
    if not answer.received:
        why = f"no token came before {close} (still in prefill, or a proxy holds the answer back)"
        raise void(
            why,
            "run this on an idle or faster machine, with llama-server's KV cache on, and without a proxy",
        )
    itself = "set VOICE_LLM_URL to llama-server itself, without a proxy"
    if tasks is None:
        raise void(f"/slots did not answer between the first token and {close}", itself)
    if not tasks:
        raise void("/slots showed no slot at work while tokens came", f"{itself} that caches")
    if len(tasks) > 1:
        others = "stop the other requests, or start llama-server with -np 1"
        raise void(
            f"{len(tasks)} requests were at work at once, and /slots does not tell which is ours",
            others,
        )
    idle_ms = round((end_of(tasks[0]) - answer.start) * 1000 - answer.closed_at_ms, 3)
    sse.say(
        f"{sse.plural(answer.received, 'fragment')} by {answer.closed_at_ms:.1f} ms, slot idle {idle_ms:.1f} ms later"
    )
    return {
        "max_tokens": MAX_TOKENS,
        "received_tokens": answer.received,
        "closed_at_ms": answer.closed_at_ms,
        "slot_idle_after_ms": idle_ms,
    }


def during_prefill(texts):
    """→ the content of cancel_prefill.json. Times in milliseconds. Raises sse.Failure."""
    messages = sse.chat(long_prompt(texts), question())
    sse.wait_idle()
    sse.say(
        f"hanging up in the prefill of {sse.plural(len(texts), 'document')}; the next caller waits ... ",
        end="",
    )
    with sse.Answer(messages, cache_prompt=False, cut_after=EARLY_CUT) as left:
        list(left)
    check_close(left, EARLY_CUT)
    if left.first_token_ms is not None:
        longer = "lengthen the prompt (VOICE_LLM_SYSTEM, or documents in VOICE_LLM_KB) until prefill takes longer"
        raise void(f"the first token came before the close at {EARLY_CUT * 1000:.0f} ms", longer)
    if left.accepted_ms is None:
        raise void(
            f"the server had not accepted the request by the close at {EARLY_CUT * 1000:.0f} ms",
            TOO_FAR,
        )
    with sse.Answer(HI, max_tokens=4, cache_prompt=False) as following:
        chunks = list(following)
    wait_ms = round(
        (following.start - left.start) * 1000 - left.closed_at_ms + chunks[0]["t_ms"], 3
    )
    prompt_ms = sse.required_timing(following.timings, "prompt_ms")
    sse.say(
        f"{wait_ms:.1f} ms after the close at {left.closed_at_ms:.1f} ms, its own prefill {prompt_ms:.1f} ms"
    )
    return {
        "docs": len(texts),
        "closed_at_ms": left.closed_at_ms,
        "next_ttft_ms": wait_ms,
        "next_prompt_ms": prompt_ms,
    }


def main():
    options = sse.parser(__doc__)
    options.add_argument(
        "--during-prefill", action="store_true", help="hang up while the prompt is being computed"
    )
    if options.parse_args().during_prefill:
        texts = documents()
        sse.make_out()
        name, result = "cancel_prefill.json", during_prefill(texts)
        table = [
            f"hung up after     {result['closed_at_ms']:8.1f} ms of prefill of {sse.plural(len(texts), 'document')}",
            f"next caller waits {result['next_ttft_ms']:8.1f} ms for a first token",
            f"whose own prefill {result['next_prompt_ms']:8.1f} ms",
        ]
    else:
        sse.make_out()
        name, result = "cancel.json", during_generation()
        received = sse.plural(result["received_tokens"], "fragment")
        table = [
            f"closed at       {result['closed_at_ms']:8.1f} ms, {received} received",
            f"slot idle after {result['slot_idle_after_ms']:8.1f} ms",
        ]
    sse.write_result(name, result, table)


if __name__ == "__main__":
    sse.run(main)
