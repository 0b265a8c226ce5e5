#!/usr/bin/env bash
# All eight steps, one after the other: ./run_all.sh on the Pod or beside a llama-server of your own,
# ./run_all.sh --fake on any machine, against a simulated server. Needs bash (3.2 will do) and python3 (3.9).
set -u
unset CDPATH # or cd prints

usage="usage: run_all.sh [--fake]

Runs all eight steps and writes their results into VOICE_LLM_OUT (default: /root/voice/llm).
  --fake   against the suite's own fake server and documents, into fake-results/ beside this
           script unless VOICE_LLM_OUT is set; its times are simulated
Each step can be run alone; 'python3 sse.py --help' shows the settings."

fake=
case $#,${1-} in
  0,) ;;
  1,--fake) fake=yes ;;
  1,-h | 1,--help) echo "$usage"; exit 0 ;;
  *) echo "run_all.sh: can't use the options: $*" >&2; echo "$usage" >&2; exit 2 ;;
esac

# macOS has no readlink -f before version 12.3.
self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do
  folder=$(cd -P "$(dirname "$self")" && pwd)
  self=$(readlink "$self")
  case $self in /*) ;; *) self=$folder/$self ;; esac
done
here=$(cd -P "$(dirname "$self")" && pwd)

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
  echo "run_all.sh: needs python3, version 3.9 or later, on PATH" >&2
  exit 1
fi

if [ -n "$fake" ]; then
  export VOICE_LLM_KB=$here/tests/kb
  export VOICE_LLM_OUT=${VOICE_LLM_OUT:-$here/fake-results}
fi
out=${VOICE_LLM_OUT:-/root/voice/llm}

# A step runs in the background and is waited for: only so does a signal reach this script at once,
# and is passed on to the step.
child=
server=
first_line=
end() {
  status=$?
  trap - EXIT INT TERM
  for pid in $child $server; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
  rm -f -- "$out/sse.py.tmp" ${first_line:+"$first_line"} 2>/dev/null
  exit "$status"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() { # number, what it is, command: the first step that fails ends the run
  local number=$1 what=$2
  shift 2
  echo
  echo "[$number/8] $what"
  "$@" &
  child=$!
  wait "$child"
  local status=$?
  child=
  if [ "$status" -ne 0 ]; then
    if [ "$number" = 1 ] && [ -z "$pod$fake" ] && ! listens; then two_ways >&2; fi
    echo "run_all.sh: step $number ($what) failed with exit status $status" >&2
    exit "$status"
  fi
}

cancels() { # how many are in the log; nothing where there is none. One that is followed for ever is left after 5 s.
  python3 - <<'EOF'
import os, signal
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
log = Popen(["voice-llm", "log"], stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
try:
    text, ended = log.communicate(timeout=5)[0], True
except TimeoutExpired:
    os.killpg(log.pid, signal.SIGKILL)
    text, ended = log.communicate()[0], False
if log.returncode == 0 or not ended:
    print(text.count(b"cancel task"))
EOF
}

pod=
if [ -n "$fake" ]; then
  echo "SIMULATED: a fake server without a model; its times say nothing about a real one. Results go to $out."
  first_line=$(mktemp "${TMPDIR:-/tmp}/voice-llm.XXXXXX") || exit 1
  python3 "$here/tests/fake_server.py" --port 0 --end-with-parent >"$first_line" &
  server=$!
  until [ -s "$first_line" ]; do
    if ! kill -0 "$server" 2>/dev/null; then echo "run_all.sh: the fake server did not start" >&2; exit 1; fi
    sleep 0.1
  done
  read -r VOICE_LLM_URL <"$first_line"
  export VOICE_LLM_URL
elif command -v voice-llm >/dev/null; then
  pod=yes
fi
url=${VOICE_LLM_URL:-http://127.0.0.1:8080}

listens() { PYTHONPATH=$here VOICE_LLM_TIMEOUT=2 python3 -c 'import sse; sse.get("/health")' 2>/dev/null; }

two_ways() {
  echo "run_all.sh: looked for the command voice-llm (not on PATH) and for a server at $url. Two ways on:
  start one:  llama-server -m MODEL.gguf --host 127.0.0.1 --port 8080 -c 4096 -np 1 --cache-ram 0
              (one elsewhere: set VOICE_LLM_URL; no documents of your own: VOICE_LLM_KB=$here/tests/kb)
  or simulate: $here/run_all.sh --fake"
}

start() {
  if [ -n "$pod" ]; then voice-llm up || exit; fi
  exec python3 "$here/sse.py" --server
}

deliver() { # never over one that is there
  if [ -e "$out/sse.py" ]; then return; fi
  cp -- "$here/sse.py" "$out/sse.py.tmp" && mv -- "$out/sse.py.tmp" "$out/sse.py"
}

stream() {
  deliver || exit
  exec python3 "$here/sse.py"
}

step 1 "the server" start
step 2 "one answer, line by line" stream
step 3 "time to first token" python3 "$here/measure_ttft.py"
step 4 "prefill" python3 "$here/measure_prefill.py"
step 5 "KV cache" python3 "$here/measure_cache.py"
step 6 "first sentence" python3 "$here/measure_sentence.py"
if [ -n "$pod" ]; then before=$(cancels); fi
step 7 "cancel" python3 "$here/measure_cancel.py"
if [ -n "$pod" ]; then
  after=$(cancels)
  if [ "${after:-0}" -gt "${before:-0}" ]; then
    echo "voice-llm log has the server's 'cancel task'"
  elif [ -n "$after" ]; then
    echo "run_all.sh: voice-llm log has no new 'cancel task'" >&2
  fi
fi
step 8 "report" python3 "$here/report.py"
echo
echo "all results are in $out"
if [ -n "$fake" ]; then echo "SIMULATED: every time above and in these files is made up by the fake server."; fi
