#!/bin/sh
# Builds the native core with sanitizers beside the real one and runs its tests on it.
# usage: native/asan.sh [address|thread|both]; PYTHON names the interpreter. Fails on any finding.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
CC=${CC:-gcc}
export CC

check() {
    kind=$1 flags=$2 library=$3 tests=$4
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT INT TERM
    STEPWELL_CFLAGS="-O1 -g -fno-omit-frame-pointer $flags" STEPWELL_LDFLAGS="$flags" STEPWELL_WERROR=1 \
        "$python" setup.py -q build_ext --build-lib "$dir/lib" --build-temp "$dir/temp" >"$dir/log" 2>&1 ||
        { cat "$dir/log"; return 1; }
    # A package of its own, with nothing but the native part: no torch, so that a run is short.
    mkdir -p "$dir/lib/stepwell/native"
    : >"$dir/lib/stepwell/__init__.py"
    cp native/*.py "$dir/lib/stepwell/native/"
    echo "== $kind sanitizer"
    preload=$("$CC" -print-file-name="$library")
    # -P: not the real package in the current folder. CPython frees little at exit, so leaks are not
    # looked for. The thread sanitizer's memory layout does not fit full address randomisation.
    env PYTHONPATH="$dir/lib" LD_PRELOAD="$preload" \
        ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
        UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS="exitcode=66" \
        PYTHONMALLOC=malloc \
        setarch "$(uname -m)" -R "$python" -P -m pytest tests/native -q -x -s -p no:cacheprovider -m "not slow" -k "$tests" \
        -o timeout=0 -o faulthandler_timeout=0
    rm -rf "$dir"
    trap - EXIT INT TERM
}

what=${1:-both}
[ "$what" = thread ] || check address "-fsanitize=address,undefined -fno-sanitize-recover=all" libasan.so test
[ "$what" = address ] || check thread "-fsanitize=thread" libtsan.so "not forked" # it cannot follow threads into a fork
