# Makes .venv ready and sets $PY; sourced by scripts/demo, test and silicon from the repository's root. All set-up is here:
# a fresh machine needs bash, Python 3.10 or newer and a package index. Quick once the stamp fits pyproject.toml.

TORCH=torch==2.13.0   # exact: a range could pull several gigabytes of another build
TRITON=triton==3.7.1  # the one that this torch is built with; builds of torch with CUDA bring it themselves
PY=$PWD/.venv/bin/python

_find_python() {
    local candidate bare=
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
        "$candidate" -c 'import ensurepip, venv' 2>/dev/null && { echo "$candidate"; return; }
        bare=${bare:-$candidate}
    done
    if [ -n "$bare" ]; then
        echo "$bare cannot make an environment, it lacks venv or ensurepip: install them (Debian, Ubuntu: apt install" \
            "python3-venv), or name another Python in PYTHON" >&2
    else
        echo "no Python 3.10 or newer was found: install one, or name it in PYTHON" >&2
    fi
    return 1
}

_install() {
    "$PY" -m pip install --quiet --disable-pip-version-check "$@" && return
    echo "pip could not install $* (its own words are above). It needs a package index, of which it is told as ever:" \
        "PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf. What is installed by now stays" >&2
    return 1
}

# prepare_environment [EXTRAS]: with the extras of pyproject.toml, comma-separated; without, what a call of attention needs.
prepare_environment() {
    local stamp=.venv/.ready extras=${1:-} wanted python
    wanted=$(cat pyproject.toml scripts/setup.sh | cksum)
    grep -sqxF -e "$wanted: $extras" "$stamp" && return
    if [ -z "$extras" ] && grep -sqF -e "$wanted: " "$stamp"; then return; fi # more is there than is needed
    if [ ! -w . ]; then
        echo "$PWD cannot be written to, and .venv is to lie in it: copy the tree to a folder of yours" >&2
        return 1
    fi
    if [ ! -x "$PY" ]; then
        python=$(_find_python)
        echo "making .venv with $("$python" --version) (once, some minutes; 2.6 GB of disk)"
        "$python" -m venv .venv
    fi
    "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip --upgrade >/dev/null
    _install "$TORCH"
    if [ "$(uname -s)" = Linux ] && ! "$PY" -c 'import triton' 2>/dev/null; then _install "$TRITON"; fi
    _install --editable ".${extras:+[$extras]}"
    echo "$wanted: $extras" >"$stamp"
}
