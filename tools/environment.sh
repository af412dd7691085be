# Puts the project's Python first on the PATH. Sourced by the Makefile's targets, from the repository's root.
# shellcheck shell=bash
#
# An active virtual environment that has the packages is used as it is. Otherwise .venv is made, once: a second
# call finds it ready, and one that was interrupted starts over. To choose:
#     PYTHON=python3.12      the Python to make it with (default: the first of python3, python3.12 ... 3.9 that fits)
#     VENV=.venv-2.7         another folder
#     MINDSPORE=2.7.0        another MindSpore than requirements.txt names; a VENV that is named keeps its own

set -euo pipefail

_has_packages() {
    PATH="$1:$PATH" "$1/python" - <<'PYTHON' 2>/dev/null
import importlib.util, shutil, sys
packages = ["mindspore", "numpy", "mlxtend", "pytest", "xdist", "pytest_rerunfailures", "hypothesis", "asyncssh"]
sys.exit(any(importlib.util.find_spec(name) is None for name in packages) or shutil.which("mpirun") is None)
PYTHON
}

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python3.9}; do
        # Not that of an environment, which may be the one that is to be made again, but the one behind it.
        if "$candidate" -c 'import os, sys; (3, 9) <= sys.version_info[:2] <= (3, 12) or sys.exit(1); \
            behind = f"{sys.base_prefix}/bin/python3.{sys.version_info[1]}"; \
            print(behind if sys.prefix != sys.base_prefix and os.path.exists(behind) else sys.executable)' \
            2>/dev/null; then
            return
        fi
    done
    echo "MindSpore needs Python 3.9 to 3.12; none of ${PYTHON:-python3 and python3.9 to 3.12} fits." \
        "Name one: make PYTHON=/path/python3.11 ..." >&2
    return 1
}

# What pip is at, for people: on a terminal one line that changes, else a line for each package of 10 MB or more.
_show_progress() {
    local line text
    while IFS= read -r line; do
        case "$line" in
        Collecting*) text="${line%% (from *}" ;;
        *Downloading*) text="Downloading ${line##*/}" ; text="${text/Downloading   /}" ;;
        "Installing collected"*) text="Installing $(wc -w <<<"${line#*:}") packages, which takes a minute or two ..." ;;
        *) continue ;;
        esac
        if [[ -t 2 ]]; then
            printf '\r\033[K%4d s  %.90s' "$SECONDS" "$text" >&2
        elif [[ "$text" == Installing* || "$text" =~ [0-9]{2}\.[0-9]\ MB|[0-9]\ GB ]]; then
            printf '%4d s  %s\n' "$SECONDS" "$text" >&2
        fi
    done
    [[ ! -t 2 ]] || echo >&2
}

_is_made() {
    [[ -x "$1/bin/python" && "$(cat "$1/complete" 2>/dev/null)" == "$2" ]]
}

# Wait while another set-up works in the folder that is open as stdin. It is locked as long as this shell, or a pip that
# outlives it, has the folder open.
_wait_for_others() {
    "$1" - "$2" 3<&0 <<'PYTHON'
import contextlib, fcntl, sys
with contextlib.suppress(OSError):  # a file system without locks
    try:
        fcntl.flock(3, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another set-up is at work in {sys.argv[1]}; waiting for its end ...", file=sys.stderr)
        fcntl.flock(3, fcntl.LOCK_EX)
PYTHON
}

# Does the environment that is there work, and lack packages at most?
_has_its_python() {
    [[ "$(head -n 1 "$1/complete" 2>/dev/null)" == "$(realpath -m -- "$1")" ]] && _has_packages "$1/bin" &&
        { [[ -z "${PYTHON:-}" ]] || [[ "$(PYTHON="$1/bin/python" _find_python)" -ef "$2" ]]; }
}

_make_venv() {
    local venv="$1" python="$2" unfinished="an environment of tools/environment.sh, unfinished"
    # Its own has a file complete: beside Python's pyvenv.cfg, or, if it was interrupted, with a certain word.
    if [[ -e "$venv" || -L "$venv" ]] && [[ -n "$(ls -A -- "$venv" 2>&1)" ]] &&
        [[ ! -f "$venv/complete" || (! -f "$venv/pyvenv.cfg" && "$(<"$venv/complete")" != "$unfinished") ]]; then
        echo "$venv was not made by this set-up, which would empty it: remove it, or name another one (VENV=FOLDER);" \
            "if it is your environment, activate it and pip install -r requirements.txt -r requirements-dev.txt" >&2
        return 1
    fi
    if _has_its_python "$venv" "$python"; then # others may be at work in it, and it may hold the user's packages
        echo "Bringing $venv up to date, for what the lessons require has changed ..." >&2
        sed -i '1a unfinished' "$venv/complete"
    # What is named complete stays, so that one that was interrupted is known.
    elif ! { echo "Setting up $venv with $python (once; 1 to 5 minutes, about 3.5 GB) ..." >&2 &&
        mkdir -p -- "$venv" && echo "$unfinished" >"$venv/complete" &&
        find "$venv/" -mindepth 1 -maxdepth 1 ! -name complete -exec rm -rf {} + && "$python" -m venv "$venv"; }; then
        echo "'$python -m venv $venv' does not work here: is its venv module installed (Debian, Ubuntu: python3-venv)," \
            "and can $venv be written to (df -h)? Where the path has a ':', choose another: VENV=/path/of/a/folder" >&2
        return 1
    fi
    if [[ -n "${MINDSPORE:-}" ]]; then
        sed -e '/^mindspore/d' requirements.txt >"$venv/requirements.txt"
        echo "mindspore==$MINDSPORE" >>"$venv/requirements.txt"
    else
        cp requirements.txt "$venv/requirements.txt"
    fi
    env -u PYTHONPATH PIP_USER=0 "$venv/bin/python" -m pip install --no-compile --progress-bar off --disable-pip-version-check \
        -r "$venv/requirements.txt" -r requirements-dev.txt | _show_progress || {
        echo "pip could not install the packages; the lines above say why. Run the command again when that is mended" >&2
        return 1
    }
    _has_packages "$venv/bin" || {
        echo "pip has not put the packages into $venv; look for target, prefix, root or dry-run in: $venv/bin/pip config" \
            "list; unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_DRY_RUN" >&2
        return 1
    }
    # On all cores, where pip would take one, and without the packages' own tests, which are a third of all. Some
    # packages carry files that are no Python 3.
    "$venv/bin/python" -c 'import compileall, re, sys
compileall.compile_dir(sys.argv[1], rx=re.compile("/tests/"), quiet=2, workers=0)' \
        "$venv/lib" >/dev/null 2>&1 || true # Ctrl-C it does not catch, as compileall's own main() does
}

_see_what_is_wanted() {
    MINDSPORE="$given"
    [[ -z "${VENV:-}" ]] || MINDSPORE="${MINDSPORE:-$(sed -n '$s/^[0-9.]*$/&/p' "$venv/complete" 2>/dev/null || true)}"
    # With its place, for the programs of one that was moved look for their Python at the old one.
    wanted="$(realpath -m -- "$venv"; grep -hv '^#' requirements.txt requirements-dev.txt; echo "${MINDSPORE:-}")"
}

_use_environment() {
    if [[ -n "${VIRTUAL_ENV:-}" && -z "${VENV:-}" ]] && _has_packages "$VIRTUAL_ENV/bin"; then
        export PATH="$VIRTUAL_ENV/bin:$PATH"
        return
    fi
    local venv wanted python lock="" given="${MINDSPORE:-}"
    venv="$(realpath -ms -- "${VENV:-.venv}")"
    _see_what_is_wanted
    if ! _is_made "$venv" "$wanted"; then
        python="$(_find_python)"
        mkdir -p -- "$venv" 2>/dev/null || true # what is wrong with it is said below
        if [[ -d "$venv" && -r "$venv" ]]; then
            exec {lock}<"$venv"
            _wait_for_others "$python" "$venv" <&"$lock"
            _see_what_is_wanted # the other may have been told a version
        fi
        if ! _is_made "$venv" "$wanted"; then
            _make_venv "$venv" "$python"
            echo "$wanted" >"$venv/complete"
        fi
        [[ -z "$lock" ]] || exec {lock}<&-
    fi
    export PATH="$venv/bin:$PATH"
}

_use_environment
