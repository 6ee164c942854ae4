# Sourced: `check_compiler` ends the script with one clear line when there is no C++20 compiler. CXX may have arguments
# (CXX="ccache g++"), as for CMake.

check_compiler() {
  local compiler
  read -ra compiler <<<"${CXX:-g++}"
  if ! command -v "${compiler[0]}" >/dev/null; then
    echo "telegrad: needs a C++20 compiler, but there is no '${compiler[0]}'. On Debian: apt install g++" >&2
    exit 1
  fi
  if ! printf '#include <latch>\nint main() {}\n' | "${compiler[@]}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    echo "telegrad: needs a C++20 compiler; '${compiler[*]}' ($("${compiler[@]}" -dumpfullversion 2>/dev/null)) is too" \
      "old. g++ 11 is enough." >&2
    exit 1
  fi
}
