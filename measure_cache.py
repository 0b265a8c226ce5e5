#!/usr/bin/env python3
"""Step 5: what the KV cache saves, and what breaks it.

A short "hi" takes the slot. Then one long prompt, the system prompt with all
documents, is sent with the KV cache on, and cache.json has {"prompt_n",
"ttft_ms"} for each request:

  first           nothing to reuse: the whole prompt is computed
  second          the same again: all but the last tokens are reused
  changed_suffix  with --changed-suffix only: a line with the time at the end
  changed_prefix  the time in front: what stands behind it is computed again

prompt_n: tokens that the server computed for this request (timings.prompt_n).
ttft_ms: from just before the request is sent until the first event with
content is here.

With --call it holds four calls of six turns under that prompt instead; each
turn sends what was said so far. It writes call.json:

  interrupted       3: in this turn the caller breaks in after five fragments;
                    null where an answer had ended before
  no_clock          six times {"turn", "prompt_n", "cache_n", "ttft_ms",
                    "first_sentence_ms"}
  clock_in_message  with the time in front of what the caller says
  clock_not_kept    the same, but the next turns send it without the time
  clock_in_system   with the time at the end of the system prompt

Turn 1 of no_clock is cold; the other calls begin with the prompt in the cache.
cache_n: tokens reused (timings.cache_n); null where the server does not tell.
first_sentence_ms: as in step 6; null in the interrupted turn.
"""

from collections import namedtuple

import sse
from measure_prefill import documents, long_prompt, question
from measure_sentence import first_sentence

TIME = "Current time: 14:05."
NEARLY_ALL = 0.9  # of a prompt that was computed: as good as all of it
TEMPLATE = 40  # tokens: what a chat template puts in front of every prompt is less; so is TIME

CALLER = (
    "Hello, I'd like to come on Saturday. When are you open?",
    "It is for a blood test. May I have breakfast before it?",
    "And what about my tablets in the morning, should I take them?",
    "Sorry, I meant to ask something else: where can I park?",
    "My daughter comes with me. Can she have a vaccination on that day?",
    "All right. What do we have to bring with us?",
)
PLACES = {  # of the clock, as call.json names them
    "no_clock": "no clock",
    "clock_in_message": "in message",
    "clock_not_kept": "not kept",
    "clock_in_system": "in system",
}
TURNS, INTERRUPTED, HEARD, TOKENS = 6, 3, 5, 48

# One turn of a call: its entry in call.json, what was heard of the answer and its first sentence,
# the server's count of its tokens, and whether the caller broke in.
Turn = namedtuple("Turn", "figures heard sentence predicted_n interrupted")


# ---- one prompt, three or four times
def take_slot():
    """Let the slot hold another prompt. Raises sse.Failure."""
    sse.wait_idle()
    sse.say("hi, so that the slot holds another prompt ... ", end="")
    with sse.Answer([{"role": "user", "content": "hi"}], max_tokens=4) as hi:
        list(hi)
    sse.say(f"{hi.total_ms:.0f} ms")


def tokens_of(timings):
    """(tokens computed, tokens reused or None where an old build does not tell, both in words)."""
    computed, reused = sse.required_timing(timings, "prompt_n"), None
    words = f"{sse.plural(computed, 'token')} computed"
    if timings.get("cache_n") is not None:
        reused = sse.required_timing(timings, "cache_n")
        words += f", {reused} reused"
    return computed, reused, words


def ask(title, system):
    """One answer with the KV cache on → ({"prompt_n", "ttft_ms"}, tokens reused or None)."""
    sse.wait_idle()
    sse.say(f"{title} ... ", end="")
    chunks, _, timings = sse.stream(sse.chat(system, question()), max_tokens=32, cache_prompt=True)
    computed, reused, words = tokens_of(timings)
    sse.say(f"{words}, {chunks[0]['t_ms']:.1f} ms")
    return {"prompt_n": computed, "ttft_ms": chunks[0]["t_ms"]}, reused


def check_cold(name, system, computed, reused, other_computed=0):
    """Raise sse.Failure where `system`, which shares nothing with the prompt before it, came from
    a cache. `other_computed`: the tokens that the other cold prompt of this step computed."""
    told = reused is not None and reused > max(TEMPLATE, 0.1 * (reused + computed))
    # What was computed tells where the server does not: as much as for the other cold prompt, and
    # a prompt has about as many tokens as words, or more.
    least = max(NEARLY_ALL * (other_computed - TEMPLATE), 0.5 * len(system.split()))
    if told or computed < least:
        kept = f", with {sse.plural(reused, 'token')} reused" if reused else ""
        raise sse.Failure(
            f"{name} was answered from a cache already{kept}, so there is nothing to compare with: "
            "start llama-server with --cache-ram 0 and -np 1"
        )


def measure(texts, changed_suffix=False):
    """The requests of this step → the content of cache.json. Times in ms. Raises sse.Failure."""
    system = long_prompt(texts)
    take_slot()
    first, first_reused = ask(f"first: {sse.plural(len(texts), 'document')}, cache cold", system)
    second, _ = ask("second: the same again", system)
    result = {"first": first, "second": second}
    if changed_suffix:
        result["changed_suffix"], _ = ask("changed_suffix: clock last", f"{system}\n{TIME}")
    prefix, prefix_reused = ask("changed_prefix: clock first", f"{TIME} {system}")
    result["changed_prefix"] = prefix
    check_cold("first", system, first["prompt_n"], first_reused, prefix["prompt_n"])
    check_cold("changed_prefix", system, prefix["prompt_n"], prefix_reused, first["prompt_n"])
    most = NEARLY_ALL * first["prompt_n"]
    hits = [name for name in ("second", "changed_suffix") if name in result]
    missed = [name for name in hits if result[name]["prompt_n"] >= most]
    if missed:
        why = "a model with a sliding window or recurrent memory, --no-cache-prompt, or another "
        why += "request in between"
        sse.note("not reused", f"{' and '.join(missed)} reused nothing of the prompt before: {why}")
    return result


# ---- a call of six turns
def take_turn(turn, messages, behind_hang_up):
    """Send one turn, and hang up after a few fragments if it is the interrupted one → Turn."""
    chunks = []
    # Every answer has all its tokens, so that the calls differ in nothing but the clock; and its
    # timings come with the first of them, so that they are known when the caller breaks in.
    wanted = {"ignore_eos": True, "timings_per_token": True}
    with sse.Answer(messages, TOKENS, **wanted) as answer:
        for chunk in answer:
            chunks.append(chunk)
            if turn == INTERRUPTED and len(chunks) == HEARD:
                answer.close()
    computed, reused, words = tokens_of(answer.timings)
    figures = {"turn": turn, "prompt_n": computed, "cache_n": reused, "ttft_ms": chunks[0]["t_ms"]}
    interrupted, sentence, sentence_ms = answer.total_ms is None, "", None
    if interrupted:
        sse.note_content(answer, chunks)
    else:
        sse.look_back(answer, chunks, behind_hang_up)
        sentence, sentence_ms = first_sentence(chunks, answer.total_ms)
    sse.say(f"{words}, {chunks[0]['t_ms']:.1f} ms{', interrupted' * interrupted}")
    predicted_n = sse.number(answer.timings, "predicted_n") or len(chunks)
    heard = "".join(chunk["text"] for chunk in chunks)
    figures["first_sentence_ms"] = sentence_ms
    return Turn(figures, heard, sentence, predicted_n, interrupted)


def hold_call(place, system, lines):
    """One call with the clock at `place` → [Turn, …]. Raises sse.Failure, with the turn."""
    said, turns = [], []
    for turn in range(1, TURNS + 1):
        behind_hang_up = bool(turns) and turns[-1].interrupted
        if not behind_hang_up:  # behind it, what the server still does is part of the wait
            sse.wait_idle()
        clock = f"Current time: 14:{turn + 4:02}."
        line = lines[(turn - 1) % len(lines)]
        in_message = place in ("clock_in_message", "clock_not_kept")
        newest = f"{clock}\n{line}" if in_message else line
        prompt = f"{system}\n{clock}" if place == "clock_in_system" else system
        sse.say(f"{PLACES[place]}, turn {turn} ... ", end="")
        try:
            turns.append(take_turn(turn, sse.chat(prompt, *said, newest), behind_hang_up))
        except sse.Failure as failure:
            raise sse.Failure(f"{place}, turn {turn}: {failure}") from None
        said += [line if place == "clock_not_kept" else newest, turns[-1].heard]
        if place == "no_clock" and turn == 1:
            figures = turns[0].figures
            check_cold(f"turn 1 of {place}", system, figures["prompt_n"], figures["cache_n"])
    return turns


def note_reuse(turns):
    """Note what the call without a clock computed again though the slot should have held it."""
    everything, again = [], []
    for number, turn in enumerate(turns):
        computed, reused = turn.figures["prompt_n"], turn.figures["cache_n"]
        before = turns[:number]
        if reused is not None:
            total = computed + reused
        else:  # at least the first prompt and the answers
            total = turns[0].figures["prompt_n"] + sum(other.predicted_n for other in before)
        if before and computed >= NEARLY_ALL * total:
            everything.append(number + 1)
        elif before and reused is not None and before[-1].figures["cache_n"] is not None:
            answer = before[-1].predicted_n
            # What the slot holds behind that answer, if it has kept it all:
            held = before[-1].figures["prompt_n"] + before[-1].figures["cache_n"] + answer
            if computed - (total - held) > answer / 2:
                again.append(number + 1)
    if everything:
        which = f"turn {', '.join(map(str, everything))} computed"
        which = "from turn 2 on every turn computed" if len(everything) == TURNS - 1 else which
        why = "a model that reuses nothing (sliding window, recurrent memory), a flag "
        why += "(--no-cache-prompt), or another slot or request"
        sse.note("everything again", f"{which} nearly everything again, without a clock: {why}")
    if again:
        which = f"turn {', '.join(map(str, again))} computed the answer before it again"
        why = "a template that renders it in another way (reasoning taken out), an answer cut into "
        why += "other tokens, or a sliding window that goes back to a checkpoint"
        sse.note("answer again", f"{which}, without a clock: {why}")


def measure_calls(texts):
    """Four calls → (content of call.json, the turns without a clock). Raises sse.Failure."""
    system, lines = long_prompt(texts), sse.questions(*CALLER)
    take_slot()
    calls = {place: hold_call(place, system, lines) for place in PLACES}
    note_reuse(calls["no_clock"])
    every = [turn for turns in calls.values() for turn in turns]
    counts = [turn.predicted_n for turn in every if not turn.interrupted]
    if min(counts) != max(counts):
        said = f"the answers had {min(counts)} to {max(counts)} tokens"
        sse.note("lengths", f"{said}, so not only the clock differs: the server ignores ignore_eos")
    interrupted = all(turns[INTERRUPTED - 1].interrupted for turns in calls.values())
    if not interrupted:
        said = f"an answer of turn {INTERRUPTED} had ended before the caller broke in"
        sse.note("interrupted", f"{said}, so turn 4 shows no interruption")
    figures = {place: [turn.figures for turn in turns] for place, turns in calls.items()}
    return {"interrupted": INTERRUPTED if interrupted else None, **figures}, calls["no_clock"]


def call_lines(result, turns):
    """What is printed: a line for each turn, the first sentences of the call without a clock."""
    lines = ["first token in ms (tokens computed), by where the clock is"]
    lines.append("turn" + "".join(f"{title:>18}" for title in PLACES.values()))
    for number in range(TURNS):
        row = [result[place][number] for place in PLACES]
        cells = [f"{one['ttft_ms']:9.1f} {'(' + str(one['prompt_n']) + ')':>7}" for one in row]
        lines.append(f"{number + 1:4}" + "".join(f" {cell}" for cell in cells))
    lines.append("first sentences, no clock")
    for number, turn in enumerate(turns, 1):
        sentence_ms, sentence = turn.figures["first_sentence_ms"], sse.printable(turn.sentence)
        shown = "interrupted" if sentence_ms is None else f"{sentence_ms:9.1f} ms  {sentence}"
        lines.append(f"{number:4} {shown}"[:80])
    return lines


def main():
    options = sse.parser(__doc__)
    suffix = "also ask with the time behind the prompt"
    either = options.add_mutually_exclusive_group()
    either.add_argument("--changed-suffix", action="store_true", help=suffix)
    call = "hold four calls of six turns instead"
    either.add_argument("--call", action="store_true", help=call)
    options = options.parse_args()
    texts = documents()
    long_prompt(texts)  # better to fail before the folder is made
    sse.prepare()
    if options.call:
        result, turns = measure_calls(texts)
        sse.write_result("call.json", result, [], call_lines(result, turns))
        return
    result = measure(texts, options.changed_suffix)
    table = ["request          tokens computed   first token ms"]
    table += [
        f"{name:14} {row['prompt_n']:17} {row['ttft_ms']:16.1f}" for name, row in result.items()
    ]
    sse.write_result("cache.json", result, table)


if __name__ == "__main__":
    sse.run(main)
