#!/usr/bin/env python3
"""Step 5: what the KV cache saves, and what breaks it.

A short "hi" takes the slot; then one long prompt (the system prompt with all documents) is sent
with the KV cache on, and cache.json tells for each request {"prompt_n", "ttft_ms"}:

  first              nothing to reuse: the whole prompt is computed
  second             the same again: all but the last tokens are reused
  changed_suffix     with --changed-suffix only: a line with the time behind the prompt
  changed_prefix     the time in front of the prompt: it differs from the first token on

prompt_n: tokens that the server computed for this request (timings.prompt_n).
ttft_ms: from just before the request is sent until the first event with content is here.
"""

import sse
from measure_prefill import QUESTION, documents, long_prompt

TIME = "Current time: 14:05."


def ask(name, system):
    """One answer with the cache on → ({"prompt_n", "ttft_ms"}, tokens reused). Raises sse.Failure."""
    sse.wait_idle()
    chunks, _, timings = sse.stream(sse.chat(system, QUESTION), max_tokens=32, cache_prompt=True)
    figures = {"prompt_n": sse.timing(timings, "prompt_n"), "ttft_ms": chunks[0]["t_ms"]}
    reused = sse.number(timings.get("cache_n", 0), "cache_n in the server's timings")
    sse.say("{}: {prompt_n} tokens computed, {} reused, first token {ttft_ms:.1f} ms".format(name, reused, **figures))
    return figures, reused


def measure(system, changed_suffix=False):
    """The requests of this step → the content of cache.json. Times in milliseconds. Raises sse.Failure."""
    sse.say("taking the slot with a short question")
    sse.wait_idle()
    sse.stream([{"role": "user", "content": "hi"}], max_tokens=4)
    result = {}
    result["first"], reused = ask("first", system)
    result["second"], _ = ask("second", system)
    if changed_suffix:
        result["changed_suffix"], _ = ask("changed suffix", f"{system}\n{TIME}")
    result["changed_prefix"], _ = ask("changed prefix", f"{TIME} {system}")

    # A chat template's first tokens are the same for every prompt; more than that was kept somewhere.
    # Old builds do not tell what they reused, but with another prefix they computed it all: the time
    # and the template are under 40 tokens of it.
    computed, anew = result["first"]["prompt_n"], result["changed_prefix"]["prompt_n"]
    if reused > 0.1 * (reused + computed) or computed < 0.9 * (anew - 40):
        raise sse.Failure(
            "the first request was answered from a cache already, so there is nothing to compare with: "
            "start llama-server with --cache-ram 0 and -np 1"
        )
    return result


def main(argv=None):
    options = sse.command_line(__doc__, argv, changed_suffix="also measure the time as the last line of the prompt")
    sse.make_out()
    result = measure(long_prompt(documents()), options.changed_suffix)
    sse.save({sse.out("cache.json"): result})
    print("request          tokens computed   first token ms")
    for name, figures in result.items():
        print("{:14} {prompt_n:17} {ttft_ms:16.1f}".format(name, **figures))
    print(f"wrote {sse.out('cache.json')}")


if __name__ == "__main__":
    sse.run(main)
