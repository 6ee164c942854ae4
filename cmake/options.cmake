# Compiler settings, shared by every target through telegrad_options.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(telegrad_options INTERFACE)
target_include_directories(telegrad_options INTERFACE ${PROJECT_SOURCE_DIR}/csrc)
target_compile_options(telegrad_options INTERFACE -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
                                                -Wno-missing-field-initializers) # designated initializers leave the rest at its default
target_link_libraries(telegrad_options INTERFACE Threads::Threads)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(telegrad_options INTERFACE -Wshadow=local)
  # False alarms on std::string in g++ 12 (GCC bug 105651).
  target_compile_options(telegrad_options INTERFACE -Wno-restrict)
endif()
if(TELEGRAD_WERROR)
  target_compile_options(telegrad_options INTERFACE -Werror)
endif()

if(TELEGRAD_SANITIZE)
  if(NOT TELEGRAD_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
    message(FATAL_ERROR "TELEGRAD_SANITIZE is '${TELEGRAD_SANITIZE}'; use 'address,undefined' or 'thread'.")
  endif()
  if(TELEGRAD_BUILD_PYTHON AND TELEGRAD_SANITIZE STREQUAL "thread")
    # Python itself would have to be built with it.
    message(FATAL_ERROR "The thread sanitizer is for the core and its tests: add -DTELEGRAD_BUILD_PYTHON=OFF.")
  endif()
  target_compile_options(telegrad_options INTERFACE -fsanitize=${TELEGRAD_SANITIZE} -fno-sanitize-recover=all
                                                    -fno-omit-frame-pointer)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # False alarms in instrumented code; precompiled headers lose the marks of system headers.
    target_compile_options(telegrad_options INTERFACE -Wno-maybe-uninitialized -Wno-array-bounds
                                                      -Wno-stringop-overread -Wno-stringop-overflow)
  endif()
  target_link_options(telegrad_options INTERFACE -fsanitize=${TELEGRAD_SANITIZE})
endif()
if(TELEGRAD_BUILD_FUZZERS)
  target_compile_options(telegrad_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

if(TELEGRAD_LTO AND NOT TELEGRAD_SANITIZE)
  include(CheckIPOSupported)
  check_ipo_supported(RESULT lto_works OUTPUT why_not LANGUAGES CXX)
  if(lto_works)
    set(CMAKE_INTERPROCEDURAL_OPTIMIZATION ON)
  else()
    message(STATUS "No link-time optimization: ${why_not}")
  endif()
endif()

# The sources below some folders, searched at every build: a new file needs no edit here.
function(telegrad_glob out)
  set(patterns)
  foreach(folder IN LISTS ARGN)
    list(APPEND patterns ${PROJECT_SOURCE_DIR}/csrc/${folder}/*.cc)
  endforeach()
  file(GLOB_RECURSE found CONFIGURE_DEPENDS ${patterns})
  set(${out} ${found} PARENT_SCOPE)
endfunction()
