#!/usr/bin/env python3
"""Step 3: time to first token (TTFT), five times.

Sends the question of step 2 five times with the KV cache off, so that every
run computes the whole prompt, and writes ttft.json:

  runs       five times {"ttft_ms", "total_ms", "tokens"}
  ttft_p50   the third of the five sorted ttft_ms
  total_p50  the third of the five sorted total_ms

ttft_ms: from just before the request is sent until the first event with
content is here. total_ms: until [DONE]. tokens: the server's own count
(timings.predicted_n), since a fragment need not be one token.
"""

from statistics import median

import sse

RUNS = 5


def measure(messages):
    """Five answers → the content of ttft.json. Times in milliseconds. Raises sse.Failure."""
    runs, computed = [], []
    for number in range(1, RUNS + 1):
        sse.wait_idle()
        sse.say(f"run {number} of {RUNS} ... ", end="")
        chunks, total_ms, timings = sse.stream(messages, cache_prompt=False)
        run = {
            "ttft_ms": chunks[0]["t_ms"],
            "total_ms": total_ms,
            "tokens": sse.required_timing(timings, "predicted_n"),
        }
        runs.append(run)
        computed.append(timings.get("prompt_n"))
        times = f"first token {run['ttft_ms']:.1f} ms, whole answer {total_ms:.1f} ms"
        sse.say(f"{times}, {sse.plural(run['tokens'], 'token')}")
    if any(prompt_n != computed[0] for prompt_n in computed):  # where the server has no cache_n
        raise sse.Failure(
            f"the server computed {', '.join(map(str, computed))} tokens of the same prompt, so "
            f"the KV cache was on: {sse.ITSELF}, without a proxy that drops cache_prompt"
        )
    return {
        "runs": runs,
        "ttft_p50": median([run["ttft_ms"] for run in runs]),
        "total_p50": median([run["total_ms"] for run in runs]),
    }


def main():
    sse.parser(__doc__).parse_args()
    messages = sse.chat(sse.system_prompt(sse.SYSTEM), sse.questions(sse.QUESTION)[0])
    sse.prepare()
    result = measure(messages)
    first, whole = result["ttft_p50"], result["total_p50"]
    summary = f"p50: first token {first:.1f} ms, whole answer {whole:.1f} ms"
    table = [" first token ms   whole answer ms   tokens"]
    table += [
        f"{run['ttft_ms']:15.1f} {run['total_ms']:17.1f} {run['tokens']:8}"
        for run in result["runs"]
    ]
    sse.write_result("ttft.json", result, table, [summary])


if __name__ == "__main__":
    sse.run(main)
