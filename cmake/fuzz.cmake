# Every csrc/fuzz/*_fuzz.cc and csrc/fuzz/python/*_fuzz.cc is a program of libFuzzer, for tools/fuzz.sh. The latter embed
# Python, for the parts of the core that decode Python values.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "The fuzzers need clang; the compiler is ${CMAKE_CXX_COMPILER_ID}.")
endif()

telegrad_glob(fuzz_sources fuzz)
telegrad_filter_openssl(fuzz_sources)
list(FILTER fuzz_sources INCLUDE REGEX "_fuzz(_openssl)?\\.cc$")
set(python_fuzz_sources ${fuzz_sources})
list(FILTER fuzz_sources EXCLUDE REGEX "/fuzz/python/")
list(FILTER python_fuzz_sources INCLUDE REGEX "/fuzz/python/")

foreach(source IN LISTS fuzz_sources python_fuzz_sources)
  string(REGEX REPLACE "^.*/([a-z_]+_fuzz)(_openssl)?\\.cc$" "\\1" name ${source})
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE telegrad_core)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endforeach()

add_executable(fuzz_seeds ${PROJECT_SOURCE_DIR}/csrc/fuzz/seeds.cc)
target_link_libraries(fuzz_seeds PRIVATE telegrad_core)

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module Development.Embed)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
nanobind_build_library(nanobind-static)
telegrad_glob(binding_sources codec fuzz/python)
list(FILTER binding_sources EXCLUDE REGEX "_fuzz\\.cc$")
foreach(name block buffer_leases deferred_decref messages metadata tensor_versions)
  list(APPEND binding_sources ${PROJECT_SOURCE_DIR}/csrc/python/${name}.cc)
endforeach()
add_library(telegrad_bindings STATIC ${binding_sources})
target_link_libraries(telegrad_bindings PUBLIC telegrad_core nanobind-static Python::Python)
target_include_directories(telegrad_bindings SYSTEM PUBLIC ${NB_DIR}/include)
foreach(source IN LISTS python_fuzz_sources)
  get_filename_component(name ${source} NAME_WE)
  target_link_libraries(${name} PRIVATE telegrad_bindings)
endforeach()
