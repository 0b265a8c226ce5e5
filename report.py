#!/usr/bin/env python3
"""Step 8: the key figures in one file, and a picture of where the time goes.

Reads what the five measurements wrote, asks no server, and writes report.json, seven keys:

  ttft_p50_ms, total_p50_ms        from ttft.json
  ttft_12docs_ms, prompt_n_12docs  from the last of prefill.json
  cache_ttft_ms                    from cache.json, second
  first_sentence_ms                from sentence.json
  cancel_idle_ms                   from cancel.json, slot_idle_after_ms

Then it prints every figure with a bar on one common scale, and the relations that must hold within
one run, each with its two figures. One that FAILS makes the exit status 1: its line names the step
to run again. What --changed-suffix and --during-prefill measured is shown where it is there.
"""

import json
import os
import shutil
import sys
import textwrap

import sse

# What each file must hold: float is a number from 0 up, str a text.
RUN = {"ttft_ms": float, "total_ms": float, "tokens": float}
ROW = {"docs": float, "prompt_n": float, "prompt_ms": float, "ttft_ms": float}
REQUEST = {"prompt_n": float, "ttft_ms": float}
CLOSE = {"received_tokens": float, "closed_at_ms": float, "slot_idle_after_ms": float}
SHAPES = {
    "ttft.json": {"runs": [RUN] * 5, "ttft_p50": float, "total_p50": float},
    "prefill.json": [ROW] * 3,
    "cache.json": {"first": REQUEST, "second": REQUEST, "changed_prefix": REQUEST},
    "sentence.json": {
        "ttft_ms": float,
        "first_sentence_ms": float,
        "total_ms": float,
        "first_sentence": str,
        "text": str,
    },
    "cancel.json": {"max_tokens": float, **CLOSE},
}
OPTIONAL = {"cancel_prefill.json": {"docs": float, **CLOSE}, "props.json": {}}
# Rows of the picture that are not among the seven of report.json.
MORE = [
    "first token, 0 docs",
    "first token, 4 docs",
    "cache, first",
    "cache, time at end",
    "cache, time in front",
    "stop during prefill",
]
BLOCKS = " ▏▎▍▌▋▊▉█"


# ---------------------------------------------------------------------------- the files


def load(folder):
    """The results in `folder` → {"ttft": content of ttft.json, "prefill": …}; optional ones only where they are there.

    Raises sse.Failure naming every missing file and the script that makes it, or the file and the
    key that is not what it must be.
    """
    here = {name for name in (*SHAPES, *OPTIONAL) if os.path.exists(os.path.join(folder, name))}
    missing = [f"{name} (measure_{name[:-5]}.py makes it)" for name in SHAPES if name not in here]
    if missing:
        raise sse.Failure(f"missing in {folder}: {', '.join(missing)}")
    results = {}
    for name in sorted(here):
        path = os.path.join(folder, name)
        with sse.reading(path, "make it readable"), open(path, "rb") as file:
            data = file.read()
        try:
            content = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            raise sse.Failure(f"{path} is not JSON: run the step that makes it again") from None
        check(content, {**SHAPES, **OPTIONAL}[name], path + ":")
        results[name[:-5]] = content
    if "changed_suffix" in results["cache"]:
        check(results["cache"]["changed_suffix"], REQUEST, os.path.join(folder, "cache.json: changed_suffix"))
    docs = [row["docs"] for row in results["prefill"]]
    if docs != [0, 4, 12]:
        raise sse.Failure(f"{os.path.join(folder, 'prefill.json')}: docs is {docs}, and not [0, 4, 12]")
    return results


def age(folder):
    """A line that asks whether the files are of one run, where they were written far apart; "" where not."""
    paths = [os.path.join(folder, name) for name in (*SHAPES, *OPTIONAL)]
    times = {os.path.getmtime(path): os.path.basename(path) for path in paths if os.path.exists(path)}
    minutes = (max(times) - min(times)) / 60
    if minutes < 10:
        return ""
    return f"{times[min(times)]} is {minutes:.0f} minutes older than {times[max(times)]}: are they of one run?\n"


def check(value, shape, where):
    """Raise sse.Failure, naming `where`, unless `value` is of `shape`."""
    if shape is float:
        sse.number(value, where)
    elif shape is str:
        if not isinstance(value, str):
            raise sse.Failure(f"{where} is {'missing' if value is None else repr(value)[:40]}, and not a text")
    elif isinstance(shape, list):
        if not isinstance(value, list) or len(value) != len(shape):
            raise sse.Failure(f"{where} is not a list of {len(shape)}")
        for index, item in enumerate(value):
            check(item, shape[index], f"{where}[{index}]")
    else:
        if not isinstance(value, dict):
            raise sse.Failure(f"{where} is not an object")
        for key in shape:
            check(value.get(key), shape[key], f"{where} {key}")


def figures(results):
    """The content of report.json."""
    return {
        "ttft_p50_ms": results["ttft"]["ttft_p50"],
        "total_p50_ms": results["ttft"]["total_p50"],
        "ttft_12docs_ms": results["prefill"][-1]["ttft_ms"],
        "prompt_n_12docs": results["prefill"][-1]["prompt_n"],
        "cache_ttft_ms": results["cache"]["second"]["ttft_ms"],
        "first_sentence_ms": results["sentence"]["first_sentence_ms"],
        "cancel_idle_ms": results["cancel"]["slot_idle_after_ms"],
    }


# ---------------------------------------------------------------------------- the picture


def heading(results):
    """What was measured, as far as props.json tells: model, context, slots, build."""
    props = results.get("props", {})
    settings = props.get("default_generation_settings")
    model, alias = (os.path.basename(str(props.get(key, ""))) for key in ("model_path", "model_alias"))
    known = {
        "": (model or "a model that props.json does not name") + (f" ({alias})" if alias not in ("", model) else ""),
        "context ": settings.get("n_ctx") if isinstance(settings, dict) else None,
        "slots ": props.get("total_slots"),
        "build ": props.get("build_info"),
    }
    return ", ".join(sse.visible(f"{name}{value}") for name, value in known.items() if value)


def unsteady(results, key):
    """Whether the five runs spread more than twofold: their p50 may be another one next time."""
    times = [run[key] for run in results["ttft"]["runs"]]
    return max(times) > 2 * min(times)


def rows(results):
    """Every time worth a bar → [(name, ms, words that explain it), …]."""
    cache, sentence, cancel = results["cache"], results["sentence"], results["cancel"]
    table = []
    for name, key in ("first token", "ttft"), ("whole answer", "total"):
        times = sorted(run[f"{key}_ms"] for run in results["ttft"]["runs"])
        words = f"short prompt: p50 of 5, {times[0]:.1f} to {times[-1]:.1f}"
        if unsteady(results, f"{key}_ms"):
            words += ", UNSTEADY: measure again on an idle machine"
        table.append((name, results["ttft"][f"{key}_p50"], words))
    for row in results["prefill"]:
        each, share = row["prompt_ms"] / max(row["prompt_n"], 1), row["prompt_ms"] / max(row["ttft_ms"], 0.001)
        words = f"{row['prompt_n']} tokens at {each:.2f} ms, prefill {share:.0%}"
        table.append((f"first token, {row['docs']} docs", row["ttft_ms"], words))
    for name, key in (
        ("cache, first", "first"),
        ("cache, same again", "second"),
        ("cache, time at end", "changed_suffix"),
        ("cache, time in front", "changed_prefix"),
    ):
        if key in cache:
            words = f"{cache[key]['prompt_n']} token{'s' * (cache[key]['prompt_n'] != 1)} computed"
            if key != "first":
                words += f" (first: {cache['first']['prompt_n']})"
            table.append((name, cache[key]["ttft_ms"], words))
    after = sentence["first_sentence_ms"] - sentence["ttft_ms"]
    table.append(("first sentence", sentence["first_sentence_ms"], f"speech starts; {after:.1f} after first token"))
    words = f"closed at {cancel['closed_at_ms']:.1f}, {cancel['received_tokens']} fragments received"
    table.append(("stop after hang-up", cancel["slot_idle_after_ms"], words))
    if "cancel_prefill" in results:
        early = results["cancel_prefill"]
        words = f"closed at {early['closed_at_ms']:.1f}, prompt of {early['docs']} docs"
        table.append(("stop during prefill", early["slot_idle_after_ms"], words))
    return table


def bar(length, unicode):
    """A bar `length` characters long, a float; never empty. In eighths of a block, or whole # marks."""
    if not unicode:
        return "#" * max(1, round(length))
    eighths = max(1, round(length * 8))
    return BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8].strip()


def picture(table, width, unicode):
    """`table` as aligned lines of at most `width` columns: name, ms, bar, words (below, where it is narrow)."""
    name_width = max(len(name) for name, _, _ in table)
    bar_width = max(4, min(24, width - name_width - 52))
    left = name_width + 14 + bar_width
    beside = width - left >= 24
    scale = bar_width / max(max(ms for _, ms, _ in table), 0.001)
    lines = []
    for name, ms, words in table:
        start = f"{name:{name_width}} {ms:8.1f} ms {bar(ms * scale, unicode)}"
        wrapped = textwrap.wrap(words, width - left if beside else width - 2)
        if not beside:
            lines += [start, *("  " + line for line in wrapped)]
            continue
        for text, line in zip([start, *[""] * len(wrapped)], wrapped):
            lines.append(f"{text:{left}}{line}")
    return lines


# ---------------------------------------------------------------------------- what must hold


def relations(results):
    """What must hold within one run → [(the step it is about, the sentence, left, sign, right), …]."""
    runs, (none, four, twelve), cache = results["ttft"]["runs"], results["prefill"], results["cache"]
    sentence, cancel = results["sentence"], results["cancel"]
    first, second, prefix = cache["first"], cache["second"], cache["changed_prefix"]
    closest = min(runs, key=lambda run: run["total_ms"] - run["ttft_ms"])
    length = len(sentence["first_sentence"])
    same = length if sentence["text"].startswith(sentence["first_sentence"]) else 0
    return [
        ("ttft", "the first token comes before the end, in every run", closest["ttft_ms"], "<", closest["total_ms"]),
        ("prefill", "4 documents are more tokens than none", none["prompt_n"], "<", four["prompt_n"]),
        ("prefill", "12 documents are more tokens than 4", four["prompt_n"], "<", twelve["prompt_n"]),
        ("prefill", "4 documents delay the first token", none["ttft_ms"], "<", four["ttft_ms"]),
        ("prefill", "12 documents delay it more", four["ttft_ms"], "<", twelve["ttft_ms"]),
        ("prefill", "no documents: prefill is over at the first token", none["prompt_ms"], "<=", none["ttft_ms"]),
        ("prefill", "4 documents: prefill is over at the first token", four["prompt_ms"], "<=", four["ttft_ms"]),
        ("prefill", "12 documents: prefill is over at the first token", twelve["prompt_ms"], "<=", twelve["ttft_ms"]),
        ("cache", "a hit computes fewer tokens than first", second["prompt_n"], "<", first["prompt_n"]),
        ("cache", "a hit is faster than first", second["ttft_ms"], "<", first["ttft_ms"]),
        ("cache", "changed prefix: 0.9 of first is computed again", 0.9 * first["prompt_n"], "<=", prefix["prompt_n"]),
        ("cache", "changed prefix: slower than a hit", second["ttft_ms"], "<", prefix["ttft_ms"]),
        ("sentence", "first token, then first sentence", sentence["ttft_ms"], "<=", sentence["first_sentence_ms"]),
        ("sentence", "first sentence, then the end", sentence["first_sentence_ms"], "<=", sentence["total_ms"]),
        ("sentence", "the text starts with the sentence (characters)", same, "==", length),
        ("cancel", "fragments came before the close", 0, "<", cancel["received_tokens"]),
        ("cancel", "the close came before the last token", cancel["received_tokens"], "<", cancel["max_tokens"]),
        ("cancel", "closed at 500 ms or later", 500, "<=", cancel["closed_at_ms"]),
    ]


def holds(left, sign, right):
    return {"<": left < right, "<=": left <= right, "==": left == right}[sign]


# ---------------------------------------------------------------------------- two runs


def comparison(old, new):
    """The results of two runs → lines: each figure old, new, change in percent.

    The seven of report.json first, then the others that both runs have.
    """
    pairs = {key: (value, figures(new)[key]) for key, value in figures(old).items()}
    old_rows, new_rows = ({name: ms for name, ms, _ in rows(results)} for results in (old, new))
    pairs.update((name, (old_rows[name], new_rows[name])) for name in MORE if name in old_rows and name in new_rows)
    lines = [f"{'':20} {'old':>9} {'new':>9}   change"]
    for name, (was, now) in pairs.items():
        change = f"{(now - was) / was:+8.1%}" if was else "from 0"
        runs = name.replace("_p50", "")
        mark = "  UNSTEADY" * (runs != name and (unsteady(old, runs) or unsteady(new, runs)))
        lines.append(f"{name:20} {was:9.1f} {now:9.1f} {change:>8}{mark}")
    return lines


def main(argv=None):
    options = sse.command_line(__doc__, argv, against=("DIR", "compare with the earlier results in DIR"))
    results = load(sse.out())
    if options.against is not None and not os.path.isdir(options.against):
        raise sse.Failure(f"there is no folder {options.against!r} to compare with")
    old = load(options.against) if options.against else None
    sse.save({sse.out("report.json"): figures(results)})

    try:
        BLOCKS.encode((sys.stdout and sys.stdout.encoding) or "ascii")
        unicode = True
    except UnicodeEncodeError:
        unicode = False
    width = max(36, shutil.get_terminal_size().columns)
    print(textwrap.fill(f"Where the time goes: {heading(results)}", width))
    print("\n".join(picture(rows(results), width, unicode)))
    print(f"\n{age(sse.out())}what must hold within one run:")
    failed = []
    for step, text, left, sign, right in relations(results):
        ok = holds(left, sign, right)
        print(f"{'ok' if ok else 'FAILS':6} {text:51} {round(left, 3):.10g} {sign} {round(right, 3):.10g}")
        if not ok and step not in failed:
            failed.append(step)
    if old:
        print(f"\nold: {sse.visible(options.against)}: {heading(old)}")
        print("\n".join(comparison(old, results)))
    print(f"\nwrote {sse.out('report.json')}", flush=True)
    if failed:
        scripts = " and ".join(f"measure_{step}.py" for step in failed)
        raise sse.Failure(f"what must hold does not (FAILS above): run {scripts} again, on an idle machine")


if __name__ == "__main__":
    sse.run(main)
