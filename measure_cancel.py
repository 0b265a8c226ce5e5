#!/usr/bin/env python3
"""Step 7: how fast generation stops when the caller hangs up.

Asks for a long answer, closes the connection after 0.5 s, writes cancel.json:

  max_tokens          what was asked for
  received_tokens     fragments with content that came before the close
  closed_at_ms        the close, from just before the request was sent
  slot_idle_after_ms  from the close until /slots shows that the request is over

The same prompt is sent once before, for one token: with the prompt in the KV
cache, the half second meets the answer and not the prefill. Where a fast server
has sent all of its 256 tokens by then, it is asked once more, for 2048.

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
MAX_TOKENS, MORE_TOKENS = 256, 2048
CUT, EARLY_CUT, LATE = 0.5, 0.1, 0.5  # seconds: the two closes, and how late is too late
POLL, LOOKS = 0.003, 5  # seconds between two looks at /slots; the most while tokens come
TOO_FAR = (
    "it is too far away, or was about to refuse: set VOICE_LLM_URL to a server near by, or look at "
    "its log"
)


def void(why, what_to_do):
    """The Failure for a close that did not meet what it should."""
    return sse.Failure(f"{why}, so this test is void: {what_to_do}")


def at_work():
    """The requests that the slots process → [id_task, or None in old builds, …]."""
    return [slot.get("id_task") for slot in sse.slots(required=True) if slot["is_processing"]]


def end_of(task, closed_at):
    """Wait until no slot is processing `task` → the sse.clock() at which that was seen.

    The slot was busy at the last look that found it so, or at the close, `closed_at`; where much
    time lies between that and the look that found it idle, a note says so. Raises sse.Failure.
    """
    busy_at = closed_at
    while True:
        asked = sse.clock()
        busy = task in at_work()
        now = sse.clock()
        if not busy:
            break
        busy_at = asked
        if now - closed_at > sse.timeout():
            raise sse.Failure(
                f"the slot is still busy {sse.timeout():g} s after the close: {sse.LOG}"
            )
        time.sleep(POLL)
    if now - busy_at > max(0.05, 0.1 * (now - closed_at)):
        gap = f"for {(now - busy_at) * 1000:.0f} ms nobody saw whether the slot was busy"
        causes = "/slots is slow (the network, a proxy), or this process was suspended"
        sse.note("gap", f"{gap}, so it may have been idle as much earlier: {causes}")
    return now


def check_close(answer, seconds):
    """Raise sse.Failure where the close of `answer` did not come when it should."""
    early = answer.closed_at_ms < seconds * 1000 and answer.total_ms is None
    if early or answer.closed_at_ms > (seconds + LATE) * 1000:
        when = f"the close came at {answer.closed_at_ms:.0f} ms, not at {seconds * 1000:.0f}"
        raise void(
            f"{when}: this process was suspended, or the machine is too busy", "run this again"
        )


def check_hung_up(answer, tasks):
    """Raise sse.Failure where the close of `answer` did not meet a request that was generating.

    `tasks`: what at_work() told while tokens came; None where it did not.
    """
    close = f"the close at {CUT * 1000:.0f} ms"
    if answer.finish_reason or answer.total_ms is not None:
        hint = "use a slower model, or one that goes on counting"
        raise void(f"the answer had ended before {close}", hint)
    check_close(answer, CUT)
    if answer.accepted_ms is None:
        raise void(f"the server had not answered by {close}", TOO_FAR)
    if not answer.received and answer.first_token_ms is not None:
        raise void(f"only reasoning came before {close}", sse.NO_REASONING)
    if not answer.received:
        why = f"no token came before {close} (still in prefill, or a proxy holds the answer back)"
        hint = "run this on an idle or faster machine, with llama-server's KV cache on, and without"
        raise void(why, f"{hint} a proxy")
    itself = f"{sse.ITSELF}, without a proxy"
    if tasks is None:
        raise void(f"/slots did not answer between the first token and {close}", itself)
    if not tasks:
        raise void("/slots showed no slot at work while tokens came", f"{itself} that caches")
    if len(tasks) > 1:
        others = "stop the other requests, or start llama-server with -np 1"
        why = f"{len(tasks)} requests were at work at once, and /slots does not tell which is ours"
        raise void(why, others)


def hang_up(max_tokens):
    """Ask, and close after CUT → (the Answer, at_work() while tokens came, or None)."""
    sse.wait_idle(required=True)
    sse.say("hanging up ... ", end="")
    tasks, chunks = None, []
    with sse.Answer(COUNTING, max_tokens, cut_after=CUT) as answer:
        for chunk in answer:
            chunks.append(chunk)
            if not tasks and len(chunks) <= LOOKS:
                with contextlib.suppress(sse.Failure):
                    found = at_work()
                    if answer.closed_at_ms is None:  # a look that ends later proves nothing
                        tasks = found
    if chunks:
        sse.note_content(answer, chunks)
    return answer, tasks


def during_generation():
    """→ the content of cancel.json. Times in milliseconds. Raises sse.Failure."""
    sse.wait_idle(required=True)
    begin = sse.clock()
    sse.say("one token, so that the prompt is in the KV cache ... ", end="")
    with contextlib.suppress(sse.Failure), sse.Answer(COUNTING, max_tokens=1) as answer:
        list(answer)  # what goes wrong here goes wrong again below
    sse.say(f"{(sse.clock() - begin) * 1000:.0f} ms")
    answer, tasks = hang_up(MAX_TOKENS)
    predicted_n = sse.number(answer.timings, "predicted_n") or 0
    if answer.finish_reason == "length" or predicted_n >= MAX_TOKENS:
        sse.say(f"it had its {MAX_TOKENS} tokens before: once more, for {MORE_TOKENS}")
        answer, tasks = hang_up(MORE_TOKENS)
    check_hung_up(answer, tasks)
    closed_at = answer.start + answer.closed_at_ms / 1000
    idle_ms = round((end_of(tasks[0], closed_at) - closed_at) * 1000, 3)
    received = f"{sse.plural(answer.received, 'fragment')} by {answer.closed_at_ms:.1f} ms"
    sse.say(f"{received}, slot idle {idle_ms:.1f} ms later")
    return {
        "max_tokens": answer.max_tokens,
        "received_tokens": answer.received,
        "closed_at_ms": answer.closed_at_ms,
        "slot_idle_after_ms": idle_ms,
    }


def during_prefill(texts):
    """→ the content of cancel_prefill.json. Times in milliseconds. Raises sse.Failure."""
    messages = sse.chat(long_prompt(texts), question())
    sse.wait_idle()
    documents_ = sse.plural(len(texts), "document")
    sse.say(f"hanging up in the prefill of {documents_}; the next caller waits ... ", end="")
    with sse.Answer(messages, cache_prompt=False, cut_after=EARLY_CUT) as left:
        list(left)
    check_close(left, EARLY_CUT)
    close = f"the close at {EARLY_CUT * 1000:.0f} ms"
    if left.first_token_ms is not None:
        hint = "lengthen the prompt (VOICE_LLM_SYSTEM, or documents in VOICE_LLM_KB) until prefill"
        raise void(f"the first token came before {close}", f"{hint} takes longer")
    if left.accepted_ms is None:
        raise void(f"the server had not accepted the request by {close}", TOO_FAR)
    with sse.Answer(HI, max_tokens=4, cache_prompt=False) as following:
        chunks = list(following)
    sse.note_content(following, chunks)
    closed_at = left.start + left.closed_at_ms / 1000
    wait_ms = round((following.start - closed_at) * 1000 + chunks[0]["t_ms"], 3)
    prompt_ms = sse.required_timing(following.timings, "prompt_ms")
    waited = f"{wait_ms:.1f} ms after the close at {left.closed_at_ms:.1f} ms"
    sse.say(f"{waited}, its own prefill {prompt_ms:.1f} ms")
    return {
        "docs": len(texts),
        "closed_at_ms": left.closed_at_ms,
        "next_ttft_ms": wait_ms,
        "next_prompt_ms": prompt_ms,
    }


def main():
    options = sse.parser(__doc__)
    early = "hang up while the prompt is being computed"
    options.add_argument("--during-prefill", action="store_true", help=early)
    if options.parse_args().during_prefill:
        texts = documents()
        long_prompt(texts)  # better to fail before the folder is made
        sse.prepare()
        name, result = "cancel_prefill.json", during_prefill(texts)
        prefill = f"ms of prefill of {sse.plural(len(texts), 'document')}"
        table = [
            f"hung up after     {result['closed_at_ms']:8.1f} {prefill}",
            f"next caller waits {result['next_ttft_ms']:8.1f} ms for a first token",
            f"whose own prefill {result['next_prompt_ms']:8.1f} ms",
        ]
    else:
        sse.prepare()
        name, result = "cancel.json", during_generation()
        received = sse.plural(result["received_tokens"], "fragment")
        table = [
            f"closed at       {result['closed_at_ms']:8.1f} ms, {received} received",
            f"slot idle after {result['slot_idle_after_ms']:8.1f} ms",
        ]
    sse.write_result(name, result, table)


if __name__ == "__main__":
    sse.run(main)
