# Sourced by the scripts beside it: makes .venv from the locked versions, once for each state of the lock.
#   environment run     what the daemon needs
#   environment dev     with the checks and tests
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

say() { printf '\n==> %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "Python 3.11 or later with its venv module is needed (Debian: apt-get install python3-venv)." >&2
  return 1
}

# Whether a script in .venv was made for this place: a checkout that was moved has scripts of a Python that is not there.
is_of_this_place() { grep -qF "$(pwd -P)/.venv" "$1" 2>/dev/null; }

# Installs $2 and what follows for the Python $1: by the uv of .venv, twenty times as fast as pip; by pip where uv is not
# there or does not reach pip's index. Neither compiles what may never be imported. uv takes the certificates of the
# system, as other programs do behind a company's proxy.
install() {
  local python=$1 && shift
  UV_SYSTEM_CERTS=1 .venv/bin/python -m uv pip install --quiet --python "$python" "$@" 2>/dev/null && return
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

environment() {
  local lock=requirements.lock python wanted
  [ "$1" = dev ] && lock=requirements-dev.lock
  wanted=$(cat "$lock" pyproject.toml | cksum)
  if is_of_this_place .venv/bin/modelrunner && [ "$(cat ".venv/installed-$1" 2>/dev/null)" = "$wanted" ]; then return; fi
  python=$(find_python) || exit 1
  say "Installing into $PWD/.venv (from $lock)"
  # `activate` is the last file that venv writes.
  is_of_this_place .venv/bin/activate || "$python" -m venv --clear --without-pip .venv
  # The pip that is here brings uv in three seconds; an environment's own pip takes eight more to be made.
  local uv=(install --quiet --disable-pip-version-check --no-compile --require-hashes --only-binary :all: -r scripts/uv.lock)
  "$python" -m pip --python .venv/bin/python "${uv[@]}" 2>/dev/null ||
    { .venv/bin/python -m ensurepip >/dev/null && .venv/bin/python -m pip "${uv[@]}" 2>/dev/null; } || true
  install .venv/bin/python --require-hashes -r "$lock"
  install .venv/bin/python --no-deps --editable .
  printf '%s\n' "$wanted" > ".venv/installed-$1"
  [ "$1" = dev ] && cat requirements.lock pyproject.toml | cksum > .venv/installed-run
  return 0
}
