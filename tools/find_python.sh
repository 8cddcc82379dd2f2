#!/bin/sh
# Prints the command of a working Python 3.12 that can make virtual environments; one line on stderr if there is none.
# Candidates are tried by running them: a name on the PATH may be a version manager's stub that only prints an error.
set -eu

# Prints the interpreter's own path if "$1" is Python >= 3.12 (exactly 3.12 if "$2" is exact) with venv and pip.
probe() {
    "$1" -c "
import sys
import ensurepip, venv
ok = sys.version_info[:2] == (3, 12) if '$2' == 'exact' else sys.version_info >= (3, 12)
print(sys.executable) if ok else sys.exit(1)" 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    probe "$PYTHON" any && exit 0
    echo "PYTHON=$PYTHON: must be a Python 3.12 or newer with the venv and ensurepip modules" >&2
    exit 1
fi
for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
    /usr/bin/python3.12 /usr/local/bin/python3.12 /opt/python*/bin/python3.12 "$HOME"/.local/bin/python3.12 \
    "$HOME"/.local/share/uv/python/*3.12*/bin/python3.12 "$HOME"/*conda*/bin/python; do
    probe "$candidate" exact && exit 0
done
echo "No working Python 3.12 with venv found: install it (with its venv package) or say where it is, e.g." \
    "make PYTHON=/path/to/python3.12 ..." >&2
exit 1
