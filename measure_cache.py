#!/usr/bin/env python3
"""Step 5: what the KV cache saves, and what breaks it.

A short "hi" takes the slot. Then one long prompt, the system prompt with all
documents, is sent with the KV cache on, and cache.json has {"prompt_n",
"ttft_ms"} for each request:

  first           nothing to reuse: the whole prompt is computed
  second          the same again: all but the last tokens are reused
  changed_suffix  with --changed-suffix only: a line with the time at the end
  changed_prefix  the time in front: already the first token differs

prompt_n: tokens that the server computed for this request (timings.prompt_n).
ttft_ms: from just before the request is sent until the first event with
content is here.
"""

import sse
from measure_prefill import documents, long_prompt, question

TIME = "Current time: 14:05."
NEARLY_ALL = 0.9  # of a prompt that was computed: as good as all of it
TEMPLATE = 40  # tokens: a chat template puts fewer in front of every prompt, and so does the line with the time


def ask(what, system):
    """One answer with the KV cache on → ({"prompt_n", "ttft_ms"}, tokens reused or None). Raises sse.Failure."""
    sse.wait_idle()
    sse.say(f"{what} ... ", end="")
    chunks, _, timings = sse.stream(sse.chat(system, question()), max_tokens=32, cache_prompt=True)
    figures = {"prompt_n": sse.required_timing(timings, "prompt_n"), "ttft_ms": chunks[0]["t_ms"]}
    tokens, reused = f"{sse.plural(figures['prompt_n'], 'token')} computed", None
    if timings.get("cache_n") is not None:  # old builds don't tell
        reused = sse.required_timing(timings, "cache_n")
        tokens += f", {reused} reused"
    sse.say(f"{tokens}, {figures['ttft_ms']:.1f} ms")
    return figures, reused


def check_cold(name, system, figures, reused, other_prompt_n):
    """Raise sse.Failure where `system`, which shares nothing with the prompt before it, came from a cache.

    `other_prompt_n`: the tokens that the other cold prompt of this step computed.
    """
    computed = figures["prompt_n"]
    told = reused is not None and reused > max(TEMPLATE, 0.1 * (reused + computed))
    # What was computed tells where the server does not: as much as for the other cold prompt, and a
    # prompt has about as many tokens as words, or more.
    inferred = computed < max(NEARLY_ALL * (other_prompt_n - TEMPLATE), 0.5 * len(system.split()))
    if told or inferred:
        kept = f", with {sse.plural(reused, 'token')} reused" if reused else ""
        raise sse.Failure(
            f"{name} was answered from a cache already{kept}, so there is nothing to compare with: "
            "start llama-server with --cache-ram 0 and -np 1"
        )


def measure(texts, changed_suffix=False):
    """The requests of this step → the content of cache.json. Times in milliseconds. Raises sse.Failure."""
    system = long_prompt(texts)
    sse.wait_idle()
    sse.say("hi, so that the slot holds another prompt ... ", end="")
    with sse.Answer([{"role": "user", "content": "hi"}], max_tokens=4) as hi:
        list(hi)
    sse.say(f"{hi.total_ms:.0f} ms")
    first, first_reused = ask(f"first: {sse.plural(len(texts), 'document')}, cache cold", system)
    second, _ = ask("second: the same again", system)
    result = {"first": first, "second": second}
    if changed_suffix:
        result["changed_suffix"], _ = ask("changed_suffix: clock last", f"{system}\n{TIME}")
    prefix, prefix_reused = ask("changed_prefix: clock first", f"{TIME} {system}")
    result["changed_prefix"] = prefix
    check_cold("first", system, first, first_reused, prefix["prompt_n"])
    check_cold("changed_prefix", system, prefix, prefix_reused, first["prompt_n"])
    hits = [name for name in ("second", "changed_suffix") if name in result]
    missed = [name for name in hits if result[name]["prompt_n"] >= NEARLY_ALL * first["prompt_n"]]
    if missed:
        why = "a model with a sliding window or recurrent memory, --no-cache-prompt, or another request in between"
        sse.note("not reused", f"{' and '.join(missed)} reused nothing of the prompt before: {why}")
    return result


def main():
    options = sse.parser(__doc__)
    options.add_argument(
        "--changed-suffix", action="store_true", help="also ask with the time behind the prompt"
    )
    changed_suffix = options.parse_args().changed_suffix
    texts = documents()
    long_prompt(texts)  # better to fail before the folder is made
    sse.make_out()
    result = measure(texts, changed_suffix)
    table = ["request          tokens computed   first token ms"]
    table += [
        f"{name:14} {row['prompt_n']:17} {row['ttft_ms']:16.1f}" for name, row in result.items()
    ]
    sse.write_result("cache.json", result, table)


if __name__ == "__main__":
    sse.run(main)
