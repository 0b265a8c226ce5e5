#!/usr/bin/env bash
# All eight steps, one after the other: ./run_all.sh on the Pod or beside a llama-server of your own,
# ./run_all.sh --fake on any machine, against a simulated server. Needs bash (3.2 will do) and python3 (3.9).
set -u
unset CDPATH # or cd prints

usage="usage: run_all.sh [--fake] [--more]

Runs all eight steps and writes their results into VOICE_LLM_OUT
(default: /root/voice/llm).
  --fake   against the suite's own fake server and documents, into
           fake-results/ beside this script unless VOICE_LLM_OUT is set;
           its times are simulated
  --more   also what a line at the end of the prompt costs (step 5), and
           what the next caller waits after a hang-up during prefill (step 7)
Each step can be run alone; 'python3 sse.py --help' shows the settings."

fake='' more=''
for option; do
  case $option,$fake,$more in
    --fake,,*) fake=yes ;;
    --more,*,) more=yes ;;
    -h,* | --help,*) echo "$usage"; exit 0 ;;
    *) echo "run_all.sh: can't use the options: $*" >&2; echo "$usage" >&2; exit 2 ;;
  esac
done

self=${BASH_SOURCE[0]} # followed by hand: macOS has no readlink -f before version 12.3
while [ -L "$self" ]; do
  folder=$(cd -P "$(dirname "$self")" && pwd)
  self=$(readlink "$self")
  case $self in /*) ;; *) self=$folder/$self ;; esac
done
here=$(cd -P "$(dirname "$self")" && pwd)

for name in VOICE_LLM_URL VOICE_LLM_OUT VOICE_LLM_SYSTEM; do # one that is blank counts as unset
  case ${!name-} in *[![:space:]]*) ;; *) unset "$name" ;; esac
done
if [ -n "$fake" ]; then
  export VOICE_LLM_KB=$here/tests/kb VOICE_LLM_OUT=${VOICE_LLM_OUT:-$here/fake-results}
fi
out=${VOICE_LLM_OUT:-/root/voice/llm}
url=${VOICE_LLM_URL:-http://127.0.0.1:8080}
export VOICE_LLM_RUN_ALL=yes # no step has to say that the report comes after it

url_file='' number=''
end() { # the exit status
  trap '' INT TERM
  trap - EXIT
  local pid pids=
  for pid in $(jobs -p); do pids="$pid $pids"; done # the newest first: a step before its server
  for pid in $pids; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
  if [ -n "$url_file" ]; then rm -f -- "$url_file"; fi
  exit "$1"
}
stopped_by() { # the exit status; a second signal, as timeout sends, must not break into this
  trap '' INT TERM
  local kept="the files of later steps are as they were"
  if [ -n "$number" ]; then printf '\nrun_all.sh: stopped in step %s; %s\n' "$number" "$kept" >&2; fi
  end "$1"
}
trap 'end "$?"' EXIT
trap 'stopped_by 130' INT
trap 'stopped_by 143' TERM

wait_for() { # a command, in the background: only so does a signal reach this script at once
  "$@" &
  wait "$!"
}

stop() {
  echo "run_all.sh: $1" >&2
  exit 1
}

wait_for python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null ||
  stop "needs python3, version 3.9 or later, on PATH"

# A server that answers is used as it is.
pod='' started='' no_server='' props='' mixed=''
if [ -n "$fake" ]; then
  props="simulated: a fake server without a model" # its model_path
else
  if command -v voice-llm >/dev/null; then pod=yes; fi
  if ! props=$(cd "$here" && VOICE_LLM_TIMEOUT=2 python3 -c 'import sse; print(sse.get("/props"))' 2>/dev/null); then
    if [ -n "$pod" ]; then started=yes; else no_server=yes; fi
  fi
fi

# Real results and simulated ones never meet in a folder. props.json tells which ones it holds.
kind_of() { # the text of props.json
  case $1 in *"simulated: a fake server without a model"*) echo simulated ;; *model_path*) echo real ;; esac
}
old=
if [ -f "$out/props.json" ]; then old=$(kind_of "$(<"$out/props.json")"); fi
new=$(kind_of "$props")
if [ "$old" = simulated ] && [ "$new" != simulated ]; then
  stop "$out holds simulated results: set VOICE_LLM_OUT to another folder, or remove them"
fi
if [ "$old" = real ] && [ "$new" = simulated ]; then mixed=yes; fi
if [ -n "$fake" ] && [ -z "$old" ]; then # results without props.json may be anything
  for name in {props,health,ttft,prefill,cache,sentence,cancel,cancel_prefill,report}.json sse_raw.txt chunks.jsonl; do
    if [ -e "$out/$name" ]; then mixed=yes; fi
  done
fi
if [ -n "$mixed" ]; then stop "$out holds results that are not simulated: set VOICE_LLM_OUT to another folder"; fi

two_ways() {
  case $no_server,$url in yes,http://*) ;; *) return ;; esac
  echo "run_all.sh: looked for the command voice-llm (not on PATH) and for a server at $url. Two ways on:
  start one:  llama-server -m MODEL.gguf --host 127.0.0.1 --port 8080 -c 4096 -np 1 --cache-ram 0
              (one elsewhere: set VOICE_LLM_URL; no documents of your own: VOICE_LLM_KB=$here/tests/kb)
  or simulate: $here/run_all.sh --fake" >&2
}

wait_for python3 "$here/measure_prefill.py" --check || { two_ways; stop "nothing was measured"; }
if [ -n "${VOICE_LLM_SYSTEM-}" ]; then echo "system prompt: $VOICE_LLM_SYSTEM"; fi

if [ -n "$fake" ]; then
  echo "SIMULATED: a fake server without a model; its times say nothing about a real one."
  echo "Results go to $out."
  url_file=$(mktemp "${TMPDIR:-/tmp}/voice-llm.XXXXXX") || exit 1
  python3 "$here/tests/fake_server.py" --port 0 --end-with-parent >"$url_file" &
  until [ -s "$url_file" ]; do
    kill -0 "$!" 2>/dev/null || stop "the fake server did not start"
    sleep 0.1
  done
  read -r VOICE_LLM_URL <"$url_file"
  export VOICE_LLM_URL
fi

step() { # number, what it is
  number=$1 what=$2
  echo
  echo "[$number/8] $what"
}

failed=0
run_optional() { # a command of the step; the run goes on where it fails
  wait_for "$@" && return
  failed=$?
  echo "run_all.sh: step $number ($what) failed with exit status $failed" >&2
  if [ "$number" = 1 ]; then two_ways; fi
}
run() { run_optional "$@"; if [ "$failed" -ne 0 ]; then exit "$failed"; fi; }

port=${url#*://} port=${port%%/*}
case $port in *:*) port=${port##*:} ;; *) port=80 ;; esac
log() { # of the Pod's server: how many "cancel task" it has, and how many lines; none where it listens on another port
  local limit=''
  if command -v timeout >/dev/null; then limit="timeout 2"; fi # for a log that is followed for ever
  $limit voice-llm log 2>/dev/null </dev/null | awk -v port="[: ]$port([^0-9]|\$)" \
    '/cancel task/ { n++ } /listening/ { other = $0 !~ port } END { print other ? "0 0" : n + 0 " " NR }'
}

step 1 "the server"
if [ -n "$started" ]; then run voice-llm up; fi
run python3 "$here/sse.py" --server

step 2 "one answer, line by line"
if [ ! -e "$out/sse.py" ]; then run cp -- "$here/sse.py" "$out/sse.py"; fi
run python3 "$here/sse.py"

step 3 "time to first token"
run python3 "$here/measure_ttft.py"

step 4 "prefill"
run python3 "$here/measure_prefill.py"

step 5 "KV cache"
run python3 "$here/measure_cache.py" ${more:+--changed-suffix}

step 6 "first sentence"
run python3 "$here/measure_sentence.py"

step 7 "cancel"
if [ -n "$pod" ]; then read -r cancels lines < <(log); fi
run python3 "$here/measure_cancel.py"
if [ -n "$pod" ]; then
  read -r cancels_now lines_now < <(log)
  if [ "$cancels_now" -gt "$cancels" ]; then
    echo "voice-llm log has the server's 'cancel task'"
  elif [ "$lines_now" -gt "$lines" ] || [ -n "$started" ]; then # else it is the log of another server
    echo "run_all.sh: voice-llm log has no new 'cancel task': the server may have gone on to the answer's end" >&2
  fi
fi
if [ -n "$more" ]; then
  step 7 "hang-up during prefill"
  run_optional python3 "$here/measure_cancel.py" --during-prefill
fi

step 8 "report"
run_optional python3 "$here/report.py"
if [ -n "$fake" ]; then echo "SIMULATED: every time above and in these files is made up by the fake server."; fi
if [ "$failed" -ne 0 ]; then exit "$failed"; fi
