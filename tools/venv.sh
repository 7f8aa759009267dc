# What tools/setup and tools/env share: how a virtual environment is found whole, and how pip is asked. Read with `.`, in
# the project root, by a script that says first who it is (`ME`) and where its environment lies (`VENV`, `BEGUN`).

unset PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER PIP_ROOT PIP_REQUIRE_VIRTUALENV || true
export TENSORHUB_BUILD="${TENSORHUB_BUILD:-cc}" # the native mover, if there is a compiler: nothing is downloaded for it
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

TORCH='torch==2.13.0'
IS_RECENT='import sys; sys.exit(sys.version_info < (3, 11))'
IS_WHOLE='import os, sys, pip; sys.exit(os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1]))'

say() { printf '%s: %s\n' "$ME" "$*"; }

die() {
    printf "$ME: %s\n" "$@" >&2
    exit 1
}

find_python() {
    for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$python" -c "$IS_RECENT" >/dev/null 2>&1; then
            printf '%s\n' "$python"
            return
        fi
    done
    found=$("${PYTHON:-python3}" --version 2>&1 || true)
    die "Python 3.11 or newer is needed; '${PYTHON:-python3} --version' says: ${found:-nothing}" \
        "install one, or name it: make setup PYTHON=/path/to/python3.12"
}

pip_install() {
    if ! "$VENV/bin/python" -m pip install -qq "$@"; then
        say "pip failed; once more, with all that it says"
        if ! "$VENV/bin/python" -m pip install "$@"; then
            rm -f "$BEGUN" # it ended by itself, and has tidied up
            die "pip could not install: $*" "mend what it names, then run ${AGAIN:-make} again"
        fi
    fi
}

is_usable() {
    [ -x "$VENV/bin/python" ] && [ ! -f "$BEGUN" ] && "$VENV/bin/python" -c "$IS_RECENT" 2>/dev/null \
        && "$VENV/bin/python" -c "$IS_WHOLE" "$VENV" 2>/dev/null
}

make_venv() { # unless a whole one is there; afterwards it is begun, and not done
    if ! is_usable; then
        python=$(find_python)
        say "making a virtual environment in $VENV with $("$python" --version 2>&1)"
        rm -rf "$VENV"
        "$python" -m venv "$VENV" || die "'$python -m venv' failed" "on Debian and Ubuntu, install the package python3-venv"
    fi
    rm -f "$STAMP"
    : >"$BEGUN"
}

finish_venv() { # with what is to be remembered
    printf '%s\n' "$1" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    rm -f "$BEGUN"
}

build_mover() { # seconds, and only where it is missing or its sources have changed
    made=$("$VENV/bin/python" src/tensorhub/transport/native/build.py)
    [ "$made" = "the native mover is there" ] || say "$made"
}
