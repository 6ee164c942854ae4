# Every csrc/tests/*_test.cc is a program of its own that ctest runs and that exits with 0 when it passes.
# Other *.cc files there are shared by all of them.
telegrad_glob(test_sources tests)
telegrad_filter_openssl(test_sources)
if(NOT telegrad_openssl) # these are about secrets
  list(FILTER test_sources EXCLUDE REGEX "_openssl_test|/handshake_test|/engine_unauthenticated_test|/engine_lanes_test")
endif()
set(test_support ${test_sources})
list(FILTER test_sources INCLUDE REGEX "_test\\.cc$")
list(FILTER test_support EXCLUDE REGEX "_test\\.cc$")

# Half of the time to compile a test goes into the same headers. The extension module is built without precompiled
# ones, so a source that forgets an include still fails to compile there.
target_precompile_headers(telegrad_core PRIVATE ${PROJECT_SOURCE_DIR}/csrc/core/engine.h)

# Tests use assert-like checks of their own; keep the standard ones alive as well. Optimizing the tests takes longer
# than it saves.
set(CMAKE_POSITION_INDEPENDENT_CODE OFF) # a library and a program share precompiled headers only with the same options
function(telegrad_test_options target)
  target_compile_options(${target} PRIVATE -UNDEBUG -O0)
endfunction()

add_library(telegrad_test_support STATIC ${test_support})
target_link_libraries(telegrad_test_support PUBLIC telegrad_core)
telegrad_test_options(telegrad_test_support)
target_precompile_headers(telegrad_test_support PRIVATE ${PROJECT_SOURCE_DIR}/csrc/tests/workers.h)

# This one explores a state machine for minutes.
set_source_files_properties(${PROJECT_SOURCE_DIR}/csrc/tests/session_test.cc
                            PROPERTIES COMPILE_OPTIONS "-O1" SKIP_PRECOMPILE_HEADERS ON)

foreach(source IN LISTS test_sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  telegrad_test_options(${name})
  target_precompile_headers(${name} REUSE_FROM telegrad_test_support)
  target_link_libraries(${name} PRIVATE telegrad_test_support)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600) # each case ends earlier if it hangs (csrc/tests/check.cc)
endforeach()

# The kept inputs of the fuzzers (csrc/fuzz, tools/fuzz.sh) run here without libFuzzer; those of the fuzzers that embed
# Python run in tests/serialize/test_fuzzed_inputs.py.
telegrad_glob(fuzz_sources fuzz)
telegrad_filter_openssl(fuzz_sources)
list(FILTER fuzz_sources INCLUDE REGEX "/fuzz/[a-z_]+_fuzz(_openssl)?\\.cc$")
foreach(source IN LISTS fuzz_sources)
  string(REGEX REPLACE "^.*/([a-z_]+)_fuzz(_openssl)?\\.cc$" "\\1" target ${source})
  add_executable(${target}_replay ${source} ${PROJECT_SOURCE_DIR}/csrc/fuzz/replay.cc)
  telegrad_test_options(${target}_replay)
  target_precompile_headers(${target}_replay REUSE_FROM telegrad_test_support)
  target_link_libraries(${target}_replay PRIVATE telegrad_core)
  add_test(NAME fuzz_${target} COMMAND ${target}_replay ${PROJECT_SOURCE_DIR}/csrc/fuzz/corpus/${target})
  set_tests_properties(fuzz_${target} PROPERTIES TIMEOUT 120)
endforeach()
