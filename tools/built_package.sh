# Sourced by scripts that test another build of the extension module. The module of the checkout does not change: the
# tests import a copy of the package in the build folder.

# build_package BUILD_FOLDER OPTIONS OF CMAKE...: builds, and exports PYTHONPATH. `python` is the environment's.
build_package() {
  local folder=$1 package
  shift
  mkdir -p "$folder"

  if command -v flock >/dev/null; then
    exec 9>"$folder/.lock"
    flock 9
  fi

  if [ ! -f "$folder/build.ninja" ]; then
    . tools/check_compiler.sh
    check_compiler
    cmake -S . -B "$folder" -G Ninja -DPython_EXECUTABLE="$(command -v python)" -DTELEGRAD_WERROR=ON "$@" >/dev/null
  fi
  cmake --build "$folder" | { grep -v 'no work to do' || true; }

  package=$PWD/$folder/package
  rm -rf "$package"
  mkdir -p "$package"
  cp -r src/telegrad "$package/"
  rm -f "$package"/telegrad/_core.*.so
  cp "$folder"/_core.*.so "$package/telegrad/"
  # The environment's editable install would come before PYTHONPATH.
  cat >"$package/sitecustomize.py" <<'PY'
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildInplaceFinder"]
PY
  export PYTHONPATH=$package
}

# Checks that `python` imports the copy.
check_package() {
  python - <<'PY'
import telegrad._core

assert "/package/" in telegrad._core.__file__, telegrad._core.__file__
PY
}
