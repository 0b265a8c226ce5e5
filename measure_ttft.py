#!/usr/bin/env python3
"""Step 3: time to first token (TTFT), five times.

Sends the question of step 2 five times with the KV cache off, so that every run computes the whole
prompt, and writes ttft.json:

  runs               five times {"ttft_ms", "total_ms", "tokens"}
  ttft_p50           the third of the five sorted ttft_ms
  total_p50          the third of the five sorted total_ms

ttft_ms: from just before the request is sent until the first event with content is here.
total_ms: until [DONE]. tokens: the server's count (timings.predicted_n); a fragment need not be one.
"""

import sse

RUNS = 5


def measure():
    """Five answers → the content of ttft.json. Times in milliseconds. Raises sse.Failure."""
    runs = []
    for run in range(1, RUNS + 1):
        sse.wait_idle()
        chunks, total_ms, timings = sse.stream(sse.chat(sse.SYSTEM, sse.QUESTION), cache_prompt=False)
        runs.append({"ttft_ms": chunks[0]["t_ms"], "total_ms": total_ms, "tokens": sse.timing(timings, "predicted_n")})
        sse.say(
            "run {} of {}: first token {ttft_ms:.1f} ms, whole answer {total_ms:.1f} ms, {tokens} tokens".format(
                run, RUNS, **runs[-1]
            )
        )
    return {
        "runs": runs,
        "ttft_p50": sorted(run["ttft_ms"] for run in runs)[RUNS // 2],
        "total_p50": sorted(run["total_ms"] for run in runs)[RUNS // 2],
    }


def main(argv=None):
    sse.command_line(__doc__, argv)
    sse.make_out()
    sse.say(f"asking {RUNS} times: {sse.QUESTION}")
    result = measure()
    sse.save({sse.out("ttft.json"): result})
    print(f"first token  p50 {result['ttft_p50']:8.1f} ms")
    print(f"whole answer p50 {result['total_p50']:8.1f} ms")
    print(f"wrote {sse.out('ttft.json')}")


if __name__ == "__main__":
    sse.run(main)
