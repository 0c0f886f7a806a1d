# Makes .venv ready and sets $PY; sourced by scripts/demo, test and silicon from the repository's root. All set-up is here:
# a fresh machine needs bash, Python 3.10 or newer and a package index. Quick once the stamp fits pyproject.toml.

TORCH=torch==2.13.0   # exact: a range could pull several gigabytes of another build
TRITON=triton==3.7.1  # the one that this torch is built with; builds of torch with CUDA bring it themselves
PY=$PWD/.venv/bin/python

_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$candidate"; return; }
    done
    echo "no Python 3.10 or newer was found: install one, or name it in PYTHON" >&2
    return 1
}

_install() {
    "$PY" -m pip install --quiet --disable-pip-version-check "$@"
}

prepare_environment() {
    local stamp=.venv/.ready wanted python
    wanted=$(cat pyproject.toml scripts/setup.sh | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    if [ ! -x "$PY" ]; then
        python=$(_find_python)
        echo "making .venv with $("$python" --version) (once, some minutes; 2.6 GB of disk)"
        "$python" -m venv .venv
    fi
    "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip --upgrade >/dev/null
    _install "$TORCH"
    if [ "$(uname -s)" = Linux ] && ! "$PY" -c 'import triton' 2>/dev/null; then _install "$TRITON"; fi
    _install --editable '.[test,dev]'
    echo "$wanted" >"$stamp"
}

prepare_environment
