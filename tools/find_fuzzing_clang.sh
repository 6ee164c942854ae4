# Sourced: `find_fuzzing_clang` prints the first clang++ that links libFuzzer, or fails. FUZZ_CXX names another one.

find_fuzzing_clang() {
  local compiler
  for compiler in ${FUZZ_CXX:-} clang++ clang++-{20,19,18,17,16,15,14}; do
    if command -v "$compiler" >/dev/null &&
      printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n' |
      "$compiler" -std=c++20 -fsanitize=fuzzer,address,undefined -x c++ -o /dev/null - 2>/dev/null; then
      echo "$compiler"
      return
    fi
  done
  return 1
}
